"""Where ranks stand, and the process groups they talk in."""
