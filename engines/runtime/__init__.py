"""Running an engine: sequences, blocks, scheduler, runner, sampler, the loop that owns them."""
