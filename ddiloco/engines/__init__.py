"""Who places roles, starts them and starts them again."""
