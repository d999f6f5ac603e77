package proxy

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// application is a probe of an application that the injection moved to the agent.
type application struct {
	HTTPGet *struct {
		Path   string `json:"path"`
		Port   int    `json:"port"`
		Scheme string `json:"scheme"`
	} `json:"httpGet"`
	TCPSocket *struct {
		Port int `json:"port"`
	} `json:"tcpSocket"`
	TimeoutSeconds int `json:"timeoutSeconds"`
}

// serveStatus serves the readiness of the proxy and the probes of the applications.
func serveStatus() error {
	probes := map[string]application{}
	if text := os.Getenv("ISTIO_KUBE_APP_PROBERS"); text != "" {
		if err := json.Unmarshal([]byte(text), &probes); err != nil {
			return fmt.Errorf("ISTIO_KUBE_APP_PROBERS: %w", err)
		}
	}
	handler := http.NewServeMux()
	handler.HandleFunc("/healthz/ready", func(w http.ResponseWriter, request *http.Request) {
		response, err := http.Get("http://" + admin + "/ready")
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		defer response.Body.Close()
		w.WriteHeader(response.StatusCode)
	})
	for path, probe := range probes {
		handler.HandleFunc(path, func(w http.ResponseWriter, request *http.Request) {
			status, err := probe.check(request)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.WriteHeader(status)
		})
	}
	for _, address := range []string{":15020", ":15021"} {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		go func() { _ = http.Serve(listener, handler) }()
	}
	return nil
}

func (a *application) check(request *http.Request) (int, error) {
	ctx, cancel := context.WithTimeout(request.Context(), time.Duration(max(a.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	// Connections from this address are not redirected to Envoy.
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 6)}}
	host := os.Getenv("INSTANCE_IP")
	switch {
	case a.HTTPGet != nil:
		scheme := "http"
		if a.HTTPGet.Scheme == "HTTPS" {
			scheme = "https"
		}
		url := fmt.Sprintf("%s://%s:%d%s", scheme, host, a.HTTPGet.Port, a.HTTPGet.Path)
		forwarded, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return 0, err
		}
		transport := &http.Transport{
			DialContext: dialer.DialContext, DisableKeepAlives: true,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		}
		response, err := (&http.Client{Transport: transport}).Do(forwarded)
		if err != nil {
			return 0, err
		}
		return response.StatusCode, response.Body.Close()
	case a.TCPSocket != nil:
		connection, err := dialer.DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", host, a.TCPSocket.Port))
		if err != nil {
			return 0, err
		}
		return http.StatusOK, connection.Close()
	}
	return 0, fmt.Errorf("the type of the probe %s is not implemented", request.URL.Path)
}
