"""The configs that come with kdjax; in a wheel they are the package `kdjax.configs`."""
