"""The rank's side of a stop: where it stands, how models and steps become whole again."""
