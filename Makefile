# The front door. `make demo` and `make test` need nothing but this checkout on a Debian 12 machine.
.PHONY: build
build:
	cmake --preset release
	cmake --build --preset release
