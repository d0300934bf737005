"""One file per checkpoint layout: how codes and scales of a known layout lie on disk, read and written.

A layout's ``schemes`` says which Scheme each module has, ``tensors`` streams the canonical names and shapes, ``write``
is the way back. ``hf`` also holds the safetensors shards that all of them stand on; ``gguf`` is a source only.
"""
