# Two images from one file:
#   control-plane: operator, router and command line; no PyTorch in it
#   engine: the bundled engine
# BUILD_IMAGE needs Python 3.11 with venv and a C compiler: without one and without libraries in
# engine_image/poolwright_engine/native/compiled, the engine computes by PyTorch's operations and is slower on a CPU.
# BASE_IMAGE needs Python 3.11 with venv. PIP_ARGS may point pip at a wheelhouse (`--no-index --find-links /wheels`).
# SOURCE_DATE_EPOCH: compiled modules are checked by hash, so that they stay valid whatever time the files of a layer get.
# ENGINE_LOCKS="engine.txt" leaves CUDA libraries out where the wheelhouse holds a CPU build of PyTorch.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG BUILD_IMAGE=docker.io/library/python:3.11-bookworm

FROM ${BUILD_IMAGE} AS build
ARG PIP_ARGS=""
WORKDIR /build
COPY locks/build.txt locks/build.txt
RUN python3 -m venv /build/venv && /build/venv/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps --require-hashes -r locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY operator operator
COPY engine_image engine_image
COPY kernels kernels
COPY examples examples
COPY bench/data bench/data
RUN if command -v cc > /dev/null; then \
      cd engine_image && rm -rf poolwright_engine/native/compiled && \
      python3 -m poolwright_engine.native.library poolwright_engine/native/compiled; \
    fi
RUN /build/venv/bin/pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /dist .

FROM ${BASE_IMAGE} AS control-plane
ARG PIP_ARGS=""
LABEL org.opencontainers.image.title="Poolwright control plane" org.opencontainers.image.licenses="Apache-2.0"
COPY locks/control-plane.txt /opt/poolwright/lock.txt
RUN export SOURCE_DATE_EPOCH=315532800 && python3 -m venv /opt/poolwright && \
    /opt/poolwright/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps --require-hashes -r /opt/poolwright/lock.txt
COPY --from=build /dist /dist
RUN SOURCE_DATE_EPOCH=315532800 /opt/poolwright/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl && rm -r /dist
ENV PATH=/opt/poolwright/bin:/usr/local/bin:/usr/bin:/bin PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /
USER 65532:65532
ENTRYPOINT ["poolwright"]

FROM ${BASE_IMAGE} AS engine
ARG PIP_ARGS=""
ARG ENGINE_LOCKS="engine.txt cuda.txt"
LABEL org.opencontainers.image.title="Poolwright engine" org.opencontainers.image.licenses="Apache-2.0"
COPY locks/engine.txt locks/cuda.txt /opt/poolwright/locks/
RUN export SOURCE_DATE_EPOCH=315532800 && python3 -m venv /opt/poolwright && cd /opt/poolwright/locks && \
    /opt/poolwright/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps --require-hashes $(printf -- '-r %s ' ${ENGINE_LOCKS})
COPY --from=build /dist /dist
RUN SOURCE_DATE_EPOCH=315532800 /opt/poolwright/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl && rm -r /dist
ENV PATH=/opt/poolwright/bin:/usr/local/bin:/usr/bin:/bin PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /
USER 65532:65532
ENTRYPOINT ["poolwright-engine"]
CMD ["serve"]
