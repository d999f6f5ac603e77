# The image of the control plane: one static binary and the public roots of trust, nothing else.

FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN make build

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
# istiod, and pilot-discovery as another name of it: the name that existing charts start.
COPY --from=build /src/out/ /usr/local/bin/
# Relative paths of the defaults, such as ./etc/istio/config/mesh, start here.
WORKDIR /
USER 1337:1337
EXPOSE 8080 15010 15012 15014 15017
ENTRYPOINT ["/usr/local/bin/pilot-discovery"]
CMD ["discovery"]
