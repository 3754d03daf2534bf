"""How programs run: the executor, backends, frames of planned memory, prepared passes."""
