"""The verbs of the command line, by theme: serving, datasets, jobs, checks. Each is a few lines over the modules above."""
