"""How files store quantised weights: one module a format. Each says which float tensors a checkpoint stands for, and
what each is made of."""
