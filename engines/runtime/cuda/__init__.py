"""The engine on a GPU: static buffers, CUDA graphs, one record a step, the next step launched before the last is read."""
