"""What a run is: frozen values that load without torch."""
