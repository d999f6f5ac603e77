package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"conformance/agent"
)

const (
	// nodeAddress is the address of the node. Nothing outside the namespace has a route to it.
	nodeAddress = "172.18.0.2"
	// administrator is the token of an administrator.
	administrator = "administrator"
	startTimeout  = 3 * time.Minute
	serviceRange  = "10.96.0.0/16"
	podRange      = "10.244.0.0/16"
	balancerRange = "172.19.0.0/16"
	dnsAddress    = "10.96.0.10"
	// rareCollection makes Go's garbage collection less frequent, which saves a sixth of the API server's CPU time.
	rareCollection = "GOGC=400"
)

// inside is the cluster: the first process of its namespaces.
func inside(arguments []string) error {
	o, err := parse(arguments)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	began := time.Now()
	step := func(text string) { fmt.Printf("%6.1f s  %s\n", time.Since(began).Seconds(), text) }
	network := agent.Network{
		Node: nodeAddress, Pods: podRange, Services: serviceRange, Balancers: balancerRange,
		Iptables: filepath.Join(o.tools, "iptables"),
	}
	if err := prepare(o, &network); err != nil {
		return err
	}
	config, err := startControlPlane(o)
	if err != nil {
		return err
	}
	step("API server is ready")
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	node := &agent.Agent{
		Client: client, Network: &network, Folder: o.folder, DNS: dnsAddress, Images: images(o),
	}
	if err := node.Start(ctx); err != nil {
		return err
	}
	if err := installDNS(ctx, client); err != nil {
		return fmt.Errorf("DNS: %w", err)
	}
	step("DNS answers")
	if o.istiod != "" {
		if err := installMesh(ctx, o, config); err != nil {
			return err
		}
		step("istiod is ready")
	}
	return runCommand(o)
}

// prepare sets up the namespaces.
func prepare(o *options, network *agent.Network) error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	// The suite resolves names of the cluster.
	resolver := filepath.Join(o.folder, "resolv.conf")
	text := "nameserver " + dnsAddress + "\nsearch svc.cluster.local cluster.local\noptions ndots:5\n"
	if err := os.WriteFile(resolver, []byte(text), 0o644); err != nil {
		return err
	}
	if err := syscall.Mount(resolver, "/etc/resolv.conf", "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("/etc/resolv.conf: %w", err)
	}
	return network.Prepare()
}

// start runs a component until the namespace ends. Its output goes to a log.
func start(o *options, name string, arguments ...string) (*exec.Cmd, error) {
	log, err := os.Create(filepath.Join(o.folder, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	command := exec.Command(filepath.Join(o.tools, "bin", name), arguments...)
	command.Stdout, command.Stderr = log, log
	command.Env = []string{"HOME=" + o.folder, "PATH=" + os.Getenv("PATH"), rareCollection}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return command, nil
}

// startControlPlane starts etcd, the API server and the controllers, and returns an administrator's access.
func startControlPlane(o *options) (*rest.Config, error) {
	file := func(name string) string { return filepath.Join(o.folder, name) }
	const store = "http://127.0.0.1:2379"
	_, err := start(o, "etcd", "--data-dir", file("etcd"), "--logger", "zap", "--log-level", "warn",
		"--unsafe-no-fsync", "--listen-client-urls", store, "--advertise-client-urls", store,
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380",
		"--initial-cluster", "default=http://127.0.0.1:2380")
	if err != nil {
		return nil, err
	}
	tokens := administrator + ",admin,admin,system:masters\n"
	if err := os.WriteFile(file("tokens.csv"), []byte(tokens), 0o600); err != nil {
		return nil, err
	}
	key := file("certificates/apiserver.key")
	server, err := start(o, "kube-apiserver", "--etcd-servers="+store, "--bind-address=0.0.0.0", "--secure-port=6443",
		"--advertise-address="+nodeAddress, "--cert-dir="+file("certificates"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+key, "--service-account-signing-key-file="+key,
		"--token-auth-file="+file("tokens.csv"), "--authorization-mode=RBAC",
		"--service-cluster-ip-range="+serviceRange, "--allow-privileged=true",
		"--enable-priority-and-fairness=false", "--kubelet-preferred-address-types=InternalIP",
		"--feature-gates=ClusterTrustBundle=true",
		"--runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true")
	if err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	authority := file("certificates/apiserver.crt")
	config := &rest.Config{Host: "https://" + nodeAddress + ":6443", BearerToken: administrator, QPS: 500, Burst: 1000}
	err = until("a ready API server", startTimeout, func() error {
		select {
		case err := <-ended:
			return fatal{fmt.Errorf("the API server ended: %v; see %s", err, file("kube-apiserver.log"))}
		default:
		}
		// The server may still be writing the file. A client with CAFile would keep what it read first.
		if config.CAData, err = os.ReadFile(authority); err != nil {
			return err
		}
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			return err
		}
		response, err := client.Get(config.Host + "/readyz")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			text, _ := io.ReadAll(response.Body)
			return fmt.Errorf("%s: %s", response.Status, text)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	access := api.NewConfig()
	access.Clusters["cluster"] = &api.Cluster{Server: config.Host, CertificateAuthority: authority}
	access.AuthInfos["admin"] = &api.AuthInfo{Token: administrator}
	access.Contexts["admin"] = &api.Context{Cluster: "cluster", AuthInfo: "admin"}
	access.CurrentContext = "admin"
	if err := clientcmd.WriteToFile(*access, kubeconfig(o)); err != nil {
		return nil, err
	}
	_, err = start(o, "controllers", "--kubeconfig="+kubeconfig(o), "--root-ca-file="+authority)
	return config, err
}

func kubeconfig(o *options) string {
	return filepath.Join(o.folder, "kubeconfig")
}

// runCommand runs the command of the user. Without one, it waits.
func runCommand(o *options) error {
	if len(o.command) == 0 {
		fmt.Printf("ready; enter with: nsenter -t $(cat %s/pid) -a, and KUBECONFIG=%s\n", o.folder, kubeconfig(o))
		select {}
	}
	command := exec.Command(o.command[0], o.command[1:]...)
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	command.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig(o), rareCollection)
	err := command.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		os.Exit(exit.ExitCode())
	}
	return err
}

// fatal is an error that ends waiting.
type fatal struct{ error }

// until repeats `try` until it succeeds.
func until(what string, timeout time.Duration, try func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		err := try()
		if err == nil {
			return nil
		}
		if end := (fatal{}); errors.As(err, &end) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no %s within %s: %w", strings.TrimPrefix(what, "a "), timeout, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
