"""The engine on a GPU: static buffers, CUDA graphs, one record a step, steps launched before the last one is read."""
