# Gradwire's programs and Python package, built from this checkout:
#   docker build -t gradwire .                                  # or --build-arg BASE=ubuntu:24.04
#   docker run --rm gradwire gradwire train --data synthetic --ranks 4 --steps 20
# The stage `tools` has the packages only, for .devcontainer.
ARG BASE=debian:12
FROM ${BASE} AS tools
COPY scripts/setup.sh /tmp/setup.sh
RUN /tmp/setup.sh && rm -rf /var/lib/apt/lists/*

FROM tools
COPY . /gradwire
RUN make -C /gradwire build
ENV PATH=/gradwire/build/bin:$PATH PYTHONPATH=/gradwire/integrations/python
CMD ["gradwire", "--help"]
