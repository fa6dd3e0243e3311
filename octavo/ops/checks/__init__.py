"""What octavo.ops refuses: arguments it lacks, shapes that do not fit, lengths and ids out of range."""
