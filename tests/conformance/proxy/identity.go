package proxy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// sign is the call that signs certificates.
	sign = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
	// streamSecrets is the call with which Envoy fetches secrets.
	streamSecrets = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"
	secretType    = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
	// systemRoots are the public roots of the image.
	systemRoots = "/etc/ssl/certs/ca-certificates.crt"
	lifetime    = 24 * time.Hour
)

// raw is a message in its encoded form. The few messages of the agent are read and written by field numbers.
type raw []byte

// codec passes raw messages through.
type codec struct{}

func (codec) Marshal(message any) ([]byte, error) { return *message.(*raw), nil }

func (codec) Unmarshal(data []byte, message any) error {
	*message.(*raw) = append(raw(nil), data...)
	return nil
}

func (codec) Name() string { return "proto" }

// fields calls `visit` for each field of a message that has a length.
func (r raw) fields(visit func(number protowire.Number, value []byte)) error {
	rest := []byte(r)
	for len(rest) > 0 {
		number, kind, size := protowire.ConsumeTag(rest)
		if size < 0 {
			return protowire.ParseError(size)
		}
		rest = rest[size:]
		if kind == protowire.BytesType {
			value, size := protowire.ConsumeBytes(rest)
			if size < 0 {
				return protowire.ParseError(size)
			}
			visit(number, value)
			rest = rest[size:]
			continue
		}
		if size = protowire.ConsumeFieldValue(number, kind, rest); size < 0 {
			return protowire.ParseError(size)
		}
		rest = rest[size:]
	}
	return nil
}

func (r raw) with(number protowire.Number, value []byte) raw {
	return protowire.AppendBytes(protowire.AppendTag(r, number, protowire.BytesType), value)
}

// identity is the certificate of the workload, which the control plane signs.
type identity struct {
	address string

	mutex       sync.Mutex
	chain, key  []byte
	roots       []byte
	certificate tls.Certificate
	// renewed is closed when there is another certificate.
	renewed chan struct{}
}

// trusted returns the TLS settings of connections to the control plane.
func (i *identity) trusted() (*tls.Config, error) {
	text, err := os.ReadFile(roots)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate", roots)
	}
	host, _, err := net.SplitHostPort(i.address)
	return &tls.Config{RootCAs: pool, ServerName: host, NextProtos: []string{"h2"}}, err
}

// request creates a key and has it signed; it tries until it succeeds.
func (i *identity) request(ctx context.Context) error {
	for {
		err := i.requestOnce(ctx)
		if err == nil {
			return nil
		}
		fmt.Fprintln(os.Stderr, "certificate request failed:", err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (i *identity) requestOnce(ctx context.Context) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return err
	}
	encodedKey, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	settings, err := i.trusted()
	if err != nil {
		return err
	}
	bearer, err := os.ReadFile(token)
	if err != nil {
		return err
	}
	connection, err := grpc.NewClient("dns:///"+i.address, grpc.WithTransportCredentials(credentials.NewTLS(settings)))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+strings.TrimSpace(string(bearer)),
		"clusterid", os.Getenv("ISTIO_META_CLUSTER_ID"))
	encode := func(kind string, data []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
	}
	request := raw(nil).with(1, encode("CERTIFICATE REQUEST", csr))
	request = protowire.AppendVarint(protowire.AppendTag(request, 3, protowire.VarintType), uint64(lifetime.Seconds()))
	var response raw
	if err := connection.Invoke(ctx, sign, &request, &response, grpc.ForceCodec(codec{})); err != nil {
		return err
	}
	var entries [][]byte
	err = response.fields(func(number protowire.Number, value []byte) {
		if number == 1 {
			entries = append(entries, value)
		}
	})
	if err != nil {
		return err
	}
	if len(entries) < 2 {
		return errors.New("the response has no certificate")
	}
	var chain []byte
	for _, entry := range entries[:len(entries)-1] {
		chain = append(chain, entry...)
	}
	privateKey := encode("PRIVATE KEY", encodedKey)
	certificate, err := tls.X509KeyPair(chain, privateKey)
	if err != nil {
		return err
	}
	i.mutex.Lock()
	defer i.mutex.Unlock()
	i.chain, i.key, i.roots, i.certificate = chain, privateKey, entries[len(entries)-1], certificate
	if i.renewed != nil {
		close(i.renewed)
	}
	i.renewed = make(chan struct{})
	return nil
}

// renew requests another certificate when half of the lifetime is over.
func (i *identity) renew(ctx context.Context) {
	for {
		i.mutex.Lock()
		leaf := i.certificate.Leaf
		i.mutex.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(leaf.NotAfter) / 2):
		}
		if i.request(ctx) != nil {
			return
		}
	}
}

// serve serves the secrets to Envoy.
func (i *identity) serve(socket string) error {
	listener, err := listen(socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.ForceServerCodec(codec{}), grpc.UnknownServiceHandler(
		func(_ any, stream grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(stream)
			if method != streamSecrets {
				return status.Error(codes.Unimplemented, method)
			}
			return i.stream(stream)
		}))
	go func() { _ = server.Serve(listener) }()
	return nil
}

// stream answers one stream: the requested secrets, now and after each renewal.
func (i *identity) stream(stream grpc.ServerStream) error {
	requests := make(chan []string)
	failed := make(chan error, 1)
	go func() {
		for {
			var request raw
			if err := stream.RecvMsg(&request); err != nil {
				failed <- err
				return
			}
			names := []string{}
			_ = request.fields(func(number protowire.Number, value []byte) {
				if number == 3 {
					names = append(names, string(value))
				}
			})
			select {
			case requests <- names:
			case <-stream.Context().Done():
				return
			}
		}
	}()
	var names []string
	for count := 1; ; {
		i.mutex.Lock()
		renewed := i.renewed
		i.mutex.Unlock()
		select {
		case err := <-failed:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case asked := <-requests:
			// The acknowledgement of a response names the same secrets.
			if strings.Join(asked, "\n") == strings.Join(names, "\n") {
				continue
			}
			names = asked
		case <-renewed:
		}
		version := []byte(fmt.Sprint(count))
		count++
		response := raw(nil).with(1, version)
		for _, name := range names {
			secret, err := i.secret(name)
			if err != nil {
				fmt.Fprintln(os.Stderr, "secret", name+":", err)
				continue
			}
			response = response.with(2, raw(nil).with(1, []byte(secretType)).with(2, secret))
		}
		response = response.with(4, []byte(secretType)).with(5, version)
		if err := stream.SendMsg(&response); err != nil {
			return err
		}
	}
}

// secret returns a secret by its name: the certificate of the workload, its roots, or those in a file.
func (i *identity) secret(name string) (raw, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	inline := func(text []byte) []byte { return raw(nil).with(2, text) }
	validation := func(text []byte) raw {
		return raw(nil).with(1, []byte(name)).with(4, raw(nil).with(1, inline(text)))
	}
	certificate := func(chain, key []byte) raw {
		return raw(nil).with(1, []byte(name)).with(2, raw(nil).with(1, inline(chain)).with(2, inline(key)))
	}
	if name == "ROOTCA" {
		return validation(i.roots), nil
	}
	if file, ok := strings.CutPrefix(name, "file-root:"); ok {
		if file == "system" {
			file = systemRoots
		}
		text, err := os.ReadFile(file)
		return validation(text), err
	}
	if files, ok := strings.CutPrefix(name, "file-cert:"); ok {
		first, second, _ := strings.Cut(files, "~")
		chain, err := os.ReadFile(first)
		if err != nil {
			return nil, err
		}
		key, err := os.ReadFile(second)
		return certificate(chain, key), err
	}
	return certificate(i.chain, i.key), nil
}

// tunnel connects a socket to the control plane. Both sides are HTTP/2, so that the bytes stay as they are.
func (i *identity) tunnel(socket string) error {
	listener, err := listen(socket)
	if err != nil {
		return err
	}
	go func() {
		for {
			inside, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer inside.Close()
				if err := i.pass(inside); err != nil {
					fmt.Fprintln(os.Stderr, "connection to the control plane:", err)
				}
			}()
		}
	}()
	return nil
}

func (i *identity) pass(inside net.Conn) error {
	settings, err := i.trusted()
	if err != nil {
		return err
	}
	i.mutex.Lock()
	settings.Certificates = []tls.Certificate{i.certificate}
	i.mutex.Unlock()
	outside, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", i.address, settings)
	if err != nil {
		return err
	}
	defer outside.Close()
	ended := make(chan error, 2)
	go func() {
		_, err := io.Copy(outside, inside)
		ended <- err
	}()
	go func() {
		_, err := io.Copy(inside, outside)
		ended <- err
	}()
	return <-ended
}

// listen opens a socket in place of that of an earlier process.
func listen(socket string) (net.Listener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.Listen("unix", socket)
}
