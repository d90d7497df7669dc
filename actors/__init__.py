"""Policy: one actor a file, each a pure decision core plus a thin message loop."""
