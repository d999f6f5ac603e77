// Package proxy stands in for the programs of the proxy's image: the init container that redirects traffic, and the
// agent that runs Envoy.
package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// version is that of Istio.
	version = "1.30.3"
	// folder is where the agent and its Envoy write.
	folder = "/etc/istio/proxy"
	// roots verify the control plane.
	roots = "/var/run/secrets/istio/root-cert.pem"
	token = "/var/run/secrets/tokens/istio-token"
	admin = "127.0.0.1:15000"
	// drain is how long a terminating proxy still serves.
	drain = 5 * time.Second
)

// Main runs one of both programs.
func Main(arguments []string) error {
	switch {
	case len(arguments) > 0 && arguments[0] == "istio-iptables":
		return redirect(arguments[1:])
	case len(arguments) > 1 && arguments[0] == "proxy":
		return run(arguments[1], arguments[2:])
	}
	return fmt.Errorf("pilot-agent %q is not implemented", arguments)
}

// settings are those of the proxy.
type settings struct {
	role, domain string
	envoy        []string
	// configuration is the ProxyConfig of the mesh and the pod.
	configuration map[string]any
}

// run runs Envoy with the services of the agent until a signal.
func run(role string, arguments []string) error {
	s, err := read(role, arguments)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	address, _ := s.configuration["discoveryAddress"].(string)
	if address == "" {
		address = os.Getenv("CA_ADDR")
	}
	identity := &identity{address: address}
	if err := identity.request(ctx); err != nil {
		return err
	}
	go identity.renew(ctx)
	secrets, control := filepath.Join(folder, "sds"), filepath.Join(folder, "xds")
	if err := identity.serve(secrets); err != nil {
		return err
	}
	if err := identity.tunnel(control); err != nil {
		return err
	}
	if err := serveStatus(); err != nil {
		return err
	}
	node, err := s.node()
	if err != nil {
		return err
	}
	text, err := json.Marshal(bootstrap(node, secrets, control))
	if err != nil {
		return err
	}
	file := filepath.Join(folder, "envoy.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return err
	}
	envoy := exec.Command("/app/envoy", append(s.envoy, "-c", file)...)
	envoy.Stdout, envoy.Stderr, envoy.Dir = os.Stdout, os.Stderr, folder
	if err := envoy.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- envoy.Wait() }()
	select {
	case err := <-ended:
		return fmt.Errorf("Envoy ended: %v", err)
	case <-ctx.Done():
	}
	// Clients use other endpoints before the listeners close.
	response, err := http.Post("http://"+admin+"/drain_listeners?inboundonly&graceful&skip_exit", "text/plain", nil)
	if err == nil {
		_ = response.Body.Close()
	}
	select {
	case <-ended:
	case <-time.After(drain):
		_ = envoy.Process.Kill()
	}
	return nil
}

func read(role string, arguments []string) (*settings, error) {
	s := &settings{role: role}
	concurrency := os.Getenv("ISTIO_CPU_LIMIT")
	if concurrency == "" {
		concurrency = "1"
	}
	s.envoy = []string{"--disable-hot-restart", "--drain-strategy", "immediate", "--concurrency", concurrency}
	for index, argument := range arguments {
		name, value, joined := strings.Cut(argument, "=")
		if !joined && index+1 < len(arguments) {
			value = arguments[index+1]
		}
		switch {
		case name == "--domain":
			s.domain = value
		case name == "--proxyLogLevel":
			s.envoy = append(s.envoy, "--log-level", value)
		case name == "--proxyComponentLogLevel":
			s.envoy = append(s.envoy, "--component-log-level", value)
		}
	}
	text := os.Getenv("PROXY_CONFIG")
	if text == "" {
		text = "{}"
	}
	if err := json.Unmarshal([]byte(text), &s.configuration); err != nil {
		return nil, fmt.Errorf("PROXY_CONFIG: %w", err)
	}
	return s, nil
}

// node returns the node of the bootstrap.
func (s *settings) node() (map[string]any, error) {
	address, pod, namespace := os.Getenv("INSTANCE_IP"), os.Getenv("POD_NAME"), os.Getenv("POD_NAMESPACE")
	if address == "" || pod == "" || namespace == "" {
		return nil, errors.New("INSTANCE_IP, POD_NAME and POD_NAMESPACE must be set")
	}
	labels, err := downward("/etc/istio/pod/labels")
	if err != nil {
		return nil, err
	}
	annotations, err := downward("/etc/istio/pod/annotations")
	if err != nil {
		return nil, err
	}
	metadata := map[string]any{
		"NAME": pod, "NAMESPACE": namespace, "SERVICE_ACCOUNT": os.Getenv("SERVICE_ACCOUNT"), "INSTANCE_IPS": address,
		"LABELS": labels, "ANNOTATIONS": annotations, "ISTIO_VERSION": version, "PROXY_CONFIG": s.configuration,
	}
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		if name, ok := strings.CutPrefix(name, "ISTIO_META_"); ok {
			metadata[name] = value
		}
	}
	application := labels["app"]
	if application == "" {
		application = "istio-proxy"
	}
	return map[string]any{
		"id":      fmt.Sprintf("%s~%s~%s.%s~%s", s.role, address, pod, namespace, s.domain),
		"cluster": application + "." + namespace, "metadata": metadata,
	}, nil
}

// downward reads labels or annotations from a file of the downward API.
func downward(file string) (map[string]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	values := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, quoted, _ := strings.Cut(strings.TrimSpace(line), "=")
		value, err := strconv.Unquote(quoted)
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, line, err)
		}
		values[name] = value
	}
	return values, nil
}

// bootstrap returns Envoy's bootstrap: ADS and SDS over sockets of the agent.
func bootstrap(node map[string]any, secrets, control string) map[string]any {
	type object = map[string]any
	const options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
	overADS := object{"ads": object{}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"}
	cluster := func(name string, address object) object {
		return object{
			"name": name, "type": "STATIC", "connect_timeout": "1s",
			"load_assignment": object{"cluster_name": name, "endpoints": []any{
				object{"lb_endpoints": []any{object{"endpoint": object{"address": address}}}},
			}},
		}
	}
	local := func(name string, port int) object {
		return cluster(name, object{"socket_address": object{"address": "127.0.0.1", "port_value": port}})
	}
	agent := func(name, socket string) object {
		made := cluster(name, object{"pipe": object{"path": socket}})
		made["typed_extension_protocol_options"] = object{options: object{
			"@type":                "type.googleapis.com/" + options,
			"explicit_http_config": object{"http2_protocol_options": object{}},
		}}
		return made
	}
	host, port, _ := net.SplitHostPort(admin)
	number, _ := strconv.Atoi(port)
	return object{
		"node":  node,
		"admin": object{"address": object{"socket_address": object{"address": host, "port_value": number}}},
		"layered_runtime": object{"layers": []any{object{"name": "fixed", "static_layer": object{
			"re2.max_program_size.error_level":                         32768,
			"envoy.reloadable_features.http_reject_path_with_fragment": false,
		}}}},
		"bootstrap_extensions": []any{object{
			"name": "envoy.bootstrap.internal_listener",
			"typed_config": object{
				"@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
			},
		}},
		"dynamic_resources": object{
			"ads_config": object{
				"api_type": "DELTA_GRPC", "transport_api_version": "V3", "set_node_on_first_message_only": true,
				"grpc_services": []any{object{"envoy_grpc": object{"cluster_name": "xds-grpc"}}},
			},
			"cds_config": overADS, "lds_config": overADS,
		},
		"static_resources": object{"clusters": []any{
			local("prometheus_stats", 15000), local("agent", 15020), agent("sds-grpc", secrets),
			agent("xds-grpc", control),
		}},
	}
}
