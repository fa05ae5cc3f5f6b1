"""The command line `poolwright-engine`: verbs, help, shell completion. Owns words; everything else is called."""
