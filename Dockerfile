# The image of the control plane: one static binary and the public root certificates.

FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN make build

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
# istiod, and its link pilot-discovery, the name that Istio's charts start.
COPY --from=build /src/out/ /usr/local/bin/
# Default paths such as ./etc/istio/config/mesh are relative to this folder.
WORKDIR /
# `kubectl exec` finds pilot-discovery by its name, as `istioctl bug-report` expects.
ENV PATH=/usr/local/bin
USER 1337:1337
EXPOSE 8080 15010 15012 15014 15017
ENTRYPOINT ["/usr/local/bin/pilot-discovery"]
CMD ["discovery"]
