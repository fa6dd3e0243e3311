"""Libraries in C that the machine's compiler makes on first use; vectors and teams of threads for them."""
