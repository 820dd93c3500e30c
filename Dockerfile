# kernelgen in a container. Two targets: `simulator`, which needs no other software, and `sdk`, which has neuronx-cc.
# docs/guides/containers.md is the manual.
ARG BASE=debian:12.12-slim

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home kernelgen \
    && install -d -m 1777 /cache /output
# The container may run as any user, and users have no home there: NEFFs are kept here.
ENV NEURON_KERNELGEN_CACHE=/cache PATH=/opt/kernelgen/bin:$PATH PYTHONDONTWRITEBYTECODE=1

FROM base AS kernelgen
COPY requirements.txt requirements-dev.txt /src/
RUN python3 -m venv /opt/kernelgen \
    && pip install --no-cache-dir --require-hashes -r /src/requirements.txt \
    && sed -n '/^setuptools==/,/[^\\]$/p' /src/requirements-dev.txt >/src/setuptools.txt \
    && python3 -m venv /opt/setuptools \
    && /opt/setuptools/bin/pip install --no-cache-dir --require-hashes -r /src/setuptools.txt
COPY pyproject.toml MANIFEST.in requirements.in README.md CHANGELOG.md LICENSE /src/
COPY tools /src/tools
COPY kernels /src/kernels
RUN cd /src \
    && /opt/setuptools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /src/dist . \
    && pip install --no-cache-dir --no-deps /src/dist/*.whl

FROM base AS libnrt
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
COPY backend/nrt /src/backend/nrt
COPY backend/simulator /src/backend/simulator
RUN cmake -S /src/backend/simulator -B /build \
    && cmake --build /build --parallel 2 \
    && cmake --install /build --prefix /opt/kernelgen

# Builds kernels for the simulator, and runs programs with simulated NeuronCores (`kernelgen simulate -- …`).
FROM base AS simulator
COPY --from=kernelgen /opt/kernelgen /opt/kernelgen
COPY --from=libnrt /opt/kernelgen/lib /opt/kernelgen/lib
USER kernelgen
WORKDIR /output
ENTRYPOINT ["kernelgen"]
CMD ["--help"]

# Builds kernels for devices.
FROM base AS sdk
COPY --from=kernelgen /opt/kernelgen /opt/kernelgen
# The package index of AWS's Neuron SDK. It has no default: the user of this file must name the source of the compiler.
ARG NEURON_INDEX
ARG NEURONX_CC=2.24.5133.0+58f8de22
RUN if [ -z "${NEURON_INDEX:-}" ]; then echo "error: name the SDK's package index: --build-arg NEURON_INDEX=ADDRESS" >&2; exit 2; fi \
    && python3 -m venv /opt/neuron \
    && /opt/neuron/bin/pip install --no-cache-dir --extra-index-url "$NEURON_INDEX" "neuronx-cc==$NEURONX_CC" \
    && /opt/neuron/bin/neuronx-cc --version
ENV NEURON_SDK=/opt/neuron
USER kernelgen
WORKDIR /output
ENTRYPOINT ["kernelgen"]
CMD ["--help"]
