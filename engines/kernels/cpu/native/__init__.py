"""A whole decoding step on a CPU as one compiled call, without a compiler on the machine.

torch's CPU operators cost 5 to 20 us a call and a small model's step is some thousand of them; its matrix library also
leaves much of some processors unused. Here the step's Ops lie in a table of numbers and one Numba function walks it:
every thread of a small team runs the same walk on its share of each Op and waits at a barrier between Ops (``step``,
``team``). The matrix kernels are LLVM vector code written out by hand (``micro``), over weights packed in tiles
(``tiles``); everything else is plain loops that LLVM vectorises (``norms``, ``attend``).

**Order of sums.** An output is summed over k in one order, whatever the number of rows, threads, or batch mates, and
attention goes through a sequence's keys in the order of its blocks: a row's bits depend on that row and its own
sequence alone.

Compiled code is cached on disk by Numba, by source and processor; only the first opening on a machine compiles.
"""
