"""What `platforms/npu` calls of torch_npu, and what each wheel of the version table has of it. Imports neither."""
