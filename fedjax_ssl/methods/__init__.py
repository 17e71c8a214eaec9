"""The registry of methods: one file each, one line here."""

from fedjax_ssl.methods import fedanchor

METHODS = {
    "fedanchor": fedanchor.fedanchor,
}

# The section of the configuration that belongs to a method, where it has one.
DEFAULTS = {
    "fedanchor": fedanchor.defaults,
}
