package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	kubeletPort = 10250
	// idle is the time after which a stream without data ends.
	idle = time.Hour
	// creation is the time in which a client must open its streams.
	creation = 30 * time.Second
)

// serveKubelet serves exec, logs and port-forward for the API server. Only the namespace of the node reaches
// it, so that it needs no authentication.
func (a *Agent) serveKubelet() error {
	certificate, err := selfSigned(a.Network.Node)
	if err != nil {
		return err
	}
	address := net.JoinHostPort(a.Network.Node, strconv.Itoa(kubeletPort))
	listener, err := tls.Listen("tcp", address, &tls.Config{Certificates: []tls.Certificate{certificate}})
	if err != nil {
		return err
	}
	handler := http.NewServeMux()
	handler.HandleFunc("/exec/{namespace}/{pod}/{container}", a.exec)
	handler.HandleFunc("/portForward/{namespace}/{pod}", a.forward)
	handler.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", a.logs)
	go func() {
		err := (&http.Server{Handler: handler, ReadHeaderTimeout: creation}).Serve(listener)
		a.report("kubelet endpoint", err)
	}()
	return nil
}

func selfSigned(address string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: nodeName},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.ParseIP(address)},
	}
	encoded, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{encoded}, PrivateKey: key}, err
}

// requested returns the pod of a request.
func (a *Agent) requested(w http.ResponseWriter, request *http.Request) *pod {
	found := a.find(request.PathValue("namespace"), request.PathValue("pod"))
	if found == nil {
		http.Error(w, "pod does not exist", http.StatusNotFound)
	}
	return found
}

// executor runs commands in the containers of a pod.
type executor struct{ pod *pod }

func (e executor) ExecInContainer(ctx context.Context, _, _, name string, arguments []string, in io.Reader,
	out, errors io.WriteCloser, _ bool, _ <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	one, err := e.pod.container(name)
	if err != nil {
		return err
	}
	command, err := one.command(arguments)
	if err != nil {
		return err
	}
	command.Stdout = out
	if errors != nil {
		command.Stderr = errors
	} else {
		command.Stderr = out
	}
	if in != nil {
		// The command may end before its input does.
		pipe, err := command.StdinPipe()
		if err != nil {
			return err
		}
		go func() {
			_, _ = io.Copy(pipe, in)
			_ = pipe.Close()
		}()
	}
	return exited(runUntil(ctx, command))
}

// exited returns an error that carries the exit code to the client.
func exited(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	return err
}

func (a *Agent) exec(w http.ResponseWriter, request *http.Request) {
	found := a.requested(w, request)
	if found == nil {
		return
	}
	options, err := remotecommand.NewOptions(request)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	command := request.URL.Query()["command"]
	remotecommand.ServeExec(w, request, executor{found}, found.object.Name, string(found.object.UID),
		request.PathValue("container"), command, options, idle, creation, remotecommand.SupportedStreamingProtocols)
}

// forwarder connects to ports of a pod.
type forwarder struct{ pod *pod }

func (f forwarder) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	f.pod.mutex.Lock()
	space := f.pod.space
	f.pod.mutex.Unlock()
	if space == nil {
		return fmt.Errorf("pod %s has no network yet", f.pod.name())
	}
	var connection net.Conn
	err := space.enter(func() error {
		var err error
		connection, err = (&net.Dialer{}).DialContext(ctx, "tcp4", fmt.Sprintf("127.0.0.1:%d", port))
		return err
	})
	if err != nil {
		return err
	}
	defer connection.Close()
	ended := make(chan struct{}, 2)
	go func() {
		_, _ = io.Copy(connection, stream)
		_ = connection.(*net.TCPConn).CloseWrite()
		ended <- struct{}{}
	}()
	go func() {
		_, _ = io.Copy(stream, connection)
		ended <- struct{}{}
	}()
	<-ended
	<-ended
	return nil
}

func (a *Agent) forward(w http.ResponseWriter, request *http.Request) {
	found := a.requested(w, request)
	if found == nil {
		return
	}
	options, err := portforward.NewV4Options(request)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	portforward.ServePortForward(w, request, forwarder{found}, found.object.Name, string(found.object.UID), options,
		idle, creation, portforward.SupportedProtocols)
}

// logs sends the log of a container, from its last `tailLines` lines on, and what is added if the client follows it.
func (a *Agent) logs(w http.ResponseWriter, request *http.Request) {
	found := a.requested(w, request)
	if found == nil {
		return
	}
	one, err := found.container(request.PathValue("container"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	file, err := os.Open(a.log(found.object, one.spec.Name))
	if err != nil {
		http.Error(w, "the container has no log yet", http.StatusBadRequest)
		return
	}
	defer file.Close()
	query := request.URL.Query()
	if lines, err := strconv.Atoi(query.Get("tailLines")); err == nil {
		if err := seekTail(file, lines); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	for {
		if _, err := io.Copy(w, file); err != nil || query.Get("follow") != "true" {
			return
		}
		if flusher, ok := w.(http.Flusher); ok {
			flusher.Flush()
		}
		if !sleep(request.Context(), startupInterval) {
			return
		}
	}
}

// seekTail moves to the beginning of the last lines.
func seekTail(file *os.File, lines int) error {
	text, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	position := len(text)
	for ; position > 0; position-- {
		if text[position-1] == '\n' && position < len(text) {
			if lines--; lines <= 0 {
				break
			}
		}
	}
	_, err = file.Seek(int64(position), io.SeekStart)
	return err
}
