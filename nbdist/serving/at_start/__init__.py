"""A folder for `PYTHONPATH`: what each Python that is started with it does first."""
