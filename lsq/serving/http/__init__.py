"""A translator as an HTTP service: requests that arrive together are translated together."""
