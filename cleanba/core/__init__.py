"""The machinery that every algorithm shares; it knows of none of them. Reading order: cleanba/README.md."""
