// Package echo is the application of the mesh profiles, in place of the image echo-advanced: a server that describes
// the requests it gets, and a client that prints responses in the form that the suite reads.
package echo

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// method is the only gRPC method. Its messages are texts.
const (
	service = "conformance.Echo"
	method  = "Echo"
)

// ports is a flag that may be repeated.
type ports []string

func (p *ports) String() string { return strings.Join(*p, ",") }

func (p *ports) Set(value string) error {
	*p = append(*p, value)
	return nil
}

// Serve serves the ports in the arguments.
func Serve(arguments []string) error {
	var plain, overTLS, overGRPC, overTCP ports
	flags := flag.NewFlagSet("echo", flag.ContinueOnError)
	flags.Var(&plain, "port", "HTTP port; may be repeated")
	flags.Var(&overTLS, "tls", "one of the HTTP ports, that serves TLS; may be repeated")
	flags.Var(&overGRPC, "grpc", "gRPC port; may be repeated")
	flags.Var(&overTCP, "tcp", "TCP port; may be repeated")
	flags.String("crt", "", "ignored: the certificate is always a new one")
	flags.String("key", "", "ignored like -crt")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	fmt.Println("serving ports", &plain, &overGRPC, &overTCP)
	failed := make(chan error)
	listen := func(port string, serve func(net.Listener) error) error {
		listener, err := net.Listen("tcp", ":"+port)
		if err != nil {
			return err
		}
		go func() { failed <- fmt.Errorf("port %s: %w", port, serve(listener)) }()
		return nil
	}
	for _, port := range plain {
		server := &http.Server{Handler: answer(port), Protocols: new(http.Protocols)}
		server.Protocols.SetHTTP1(true)
		server.Protocols.SetHTTP2(true)
		server.Protocols.SetUnencryptedHTTP2(true)
		serve := server.Serve
		if slices.Contains(overTLS, port) {
			server.TLSConfig = &tls.Config{Certificates: []tls.Certificate{certificate}}
			serve = func(listener net.Listener) error { return server.ServeTLS(listener, "", "") }
		}
		if err := listen(port, serve); err != nil {
			return err
		}
	}
	for _, port := range overGRPC {
		server := grpc.NewServer()
		server.RegisterService(description(port), nil)
		if err := listen(port, server.Serve); err != nil {
			return err
		}
	}
	for _, port := range overTCP {
		if err := listen(port, echoBytes); err != nil {
			return err
		}
	}
	return <-failed
}

// describe returns the lines of a response.
func describe(port, host, url, method, protocol, peer string, headers map[string][]string) string {
	var text strings.Builder
	line := func(name, value string) { fmt.Fprintf(&text, "%s=%s\n", name, value) }
	hostname, _ := os.Hostname()
	line("ServicePort", port)
	line("Host", host)
	line("URL", url)
	line("Method", method)
	line("Proto", protocol)
	address, _, _ := net.SplitHostPort(peer)
	line("IP", address)
	for name, values := range headers {
		for _, value := range values {
			line("RequestHeader", name+":"+value)
		}
	}
	line("Hostname", hostname)
	return text.String()
}

func answer(port string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, describe(port, r.Host, r.URL.RequestURI(), r.Method, r.Proto, r.RemoteAddr, r.Header))
	})
}

// description describes the gRPC service.
func description(port string) *grpc.ServiceDesc {
	handler := func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var request wrapperspb.StringValue
		if err := decode(&request); err != nil {
			return nil, err
		}
		headers, _ := metadata.FromIncomingContext(ctx)
		host := strings.Join(headers[":authority"], ",")
		return wrapperspb.String(describe(port, host, "/"+service+"/"+method, "POST", "GRPC", "", headers)), nil
	}
	return &grpc.ServiceDesc{
		ServiceName: service, HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: method, Handler: handler}},
	}
}

// echoBytes returns to each client what it sends.
func echoBytes(listener net.Listener) error {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer connection.Close()
			_, _ = io.Copy(connection, connection)
		}()
	}
}

func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: []string{"echo"},
	}
	encoded, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{encoded}, PrivateKey: key}, err
}
