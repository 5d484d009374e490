"""Model families: one module each, and the registry that finds the right one."""
