"""CPU operators: torch only, float32 arithmetic."""
