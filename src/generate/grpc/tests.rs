//! Proxyless gRPC clients and servers of small meshes.
