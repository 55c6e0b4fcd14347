# cukern on a GPU machine. There is no CUDA toolkit in the image: torch's wheels and NVRTC's have all that is needed.
#
#   docker build -t cukern .
#   docker run --rm --gpus all cukern doctor
#   docker run --rm --gpus all -v "$PWD/results:/results" cukern bench rope --dtype b --plot results/    # rope_fw.png, rope_bw.png
#
# For counters (`cukern profile OP --ncu`) add --cap-add SYS_ADMIN and an image with Nsight Compute.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch matplotlib
COPY . /src
RUN pip install --no-cache-dir "/src[bench]" && rm -rf /src && mkdir /results
ENV CUKERN_CACHE_DIR=/opt/cukern
RUN CUKERN_CACHE_DIR=/opt/cukern cukern compile square --gpu h200
WORKDIR /
ENTRYPOINT ["cukern"]
