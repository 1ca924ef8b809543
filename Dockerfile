# Serves one model on a CPU: docs/serving.md, "In a container". The model is mounted, never part of the image.
FROM python:3.11-slim AS build
# The CPU build of torch: the usual one brings some gigabytes of CUDA libraries.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
RUN python -m venv /opt/vitrail
COPY constraints.txt ./
RUN /opt/vitrail/bin/pip install --no-cache-dir --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/vitrail/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve,fast]'

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home vitrail
COPY --from=build /opt/vitrail /opt/vitrail
ENV PATH=/opt/vitrail/bin:$PATH
USER 10001
WORKDIR /home/vitrail
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=3)"]
ENTRYPOINT ["vitrail"]
CMD ["serve", "/models/model.safetensors", "--host", "0.0.0.0", "--port", "8000"]
