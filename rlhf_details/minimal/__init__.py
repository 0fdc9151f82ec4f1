"""The algorithms alone, a page each: one process, no options. Read these first; the pages above add what use needs."""
