"""An interpreter for the graphs that torchair makes for GE, over the memory of the emulated devices."""
