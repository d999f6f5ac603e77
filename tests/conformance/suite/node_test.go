package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"
)

const (
	namespace = "node-test"
	name      = "web"
	deadline  = time.Minute
)

// node is a cluster with one application.
type node struct {
	*testing.T
	config *rest.Config
	client kubernetes.Interface
}

// TestNode checks what the suite needs from the node agent, with a Deployment and its Service.
func TestNode(t *testing.T) {
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t, config, kubernetes.NewForConfigOrDie(config)}
	n.create(2)
	pods := n.ready(2)
	service := n.service()

	balancer := service.Status.LoadBalancer.Ingress[0].IP
	names := map[string]bool{pods[0].Name: true, pods[1].Name: true}
	for _, host := range []string{balancer, service.Spec.ClusterIP, name + "." + namespace + ".svc.cluster.local"} {
		seen := map[string]bool{}
		n.until("answers of both pods from "+host, func() error {
			body, err := get("http://" + host + "/")
			if err != nil {
				return err
			}
			_, hostname, _ := strings.Cut(body, "Hostname=")
			hostname, _, _ = strings.Cut(hostname, "\n")
			if !names[hostname] {
				return fatal{fmt.Errorf("answer of %q: %s", hostname, body)}
			}
			if seen[hostname] = true; len(seen) < 2 {
				return fmt.Errorf("only %v answered", seen)
			}
			return nil
		})
	}

	output, err := n.exec(pods[0].Name, "cat", "/etc/hostname")
	if err != nil || strings.TrimSpace(output) != pods[0].Name {
		t.Errorf("exec: %q, %v", output, err)
	}
	var exit utilexec.CodeExitError
	if _, err = n.exec(pods[0].Name, "sh", "-c", "exit 7"); !errors.As(err, &exit) || exit.Code != 7 {
		t.Errorf("the exit code of a command is not 7: %v", err)
	}
	n.logs(pods[0].Name)
	n.forward(pods[0].Name)

	n.scale(1)
	last := n.ready(1)[0].Name
	n.until("an answer of a pod to itself", func() error {
		output, err := n.exec(last, "client", "http://"+name+"/")
		if err == nil && !strings.Contains(output, "Hostname="+last) {
			err = errors.New(output)
		}
		return err
	})
	n.scale(0)
	n.ready(0)
	n.until("a refused connection", func() error {
		if _, err := get("http://" + balancer + "/"); err == nil || !strings.Contains(err.Error(), "refused") {
			return fmt.Errorf("the Service has no pods: %v", err)
		}
		return nil
	})
	err = n.client.CoreV1().Namespaces().Delete(context.Background(), namespace, meta.DeleteOptions{})
	if err != nil {
		t.Error(err)
	}
}

func (n *node) create(replicas int32) {
	n.Helper()
	ctx, options := context.Background(), meta.CreateOptions{}
	metadata := meta.ObjectMeta{Namespace: namespace, Name: name}
	labels := map[string]string{"app": name}
	_, err := n.client.CoreV1().Namespaces().Create(ctx,
		&core.Namespace{ObjectMeta: meta.ObjectMeta{Name: namespace}}, options)
	if err != nil {
		n.Fatal(err)
	}
	_, err = n.client.CoreV1().Services(namespace).Create(ctx, &core.Service{ObjectMeta: metadata, Spec: core.ServiceSpec{
		Type: core.ServiceTypeLoadBalancer, Selector: labels,
		Ports: []core.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("web")}},
	}}, options)
	if err != nil {
		n.Fatal(err)
	}
	container := core.Container{
		Name: name, Image: "registry.example/echo-advanced:v1", Args: []string{"--port=8080"},
		Ports: []core.ContainerPort{{Name: "web", ContainerPort: 8080}},
		ReadinessProbe: &core.Probe{ProbeHandler: core.ProbeHandler{
			HTTPGet: &core.HTTPGetAction{Path: "/", Port: intstr.FromString("web")},
		}},
	}
	_, err = n.client.AppsV1().Deployments(namespace).Create(ctx, &apps.Deployment{
		ObjectMeta: metadata,
		Spec: apps.DeploymentSpec{
			Replicas: &replicas, Selector: &meta.LabelSelector{MatchLabels: labels},
			Template: core.PodTemplateSpec{
				ObjectMeta: meta.ObjectMeta{Labels: labels},
				Spec:       core.PodSpec{Containers: []core.Container{container}},
			},
		},
	}, options)
	if err != nil {
		n.Fatal(err)
	}
}

func (n *node) scale(replicas int32) {
	n.Helper()
	patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas)
	_, err := n.client.AppsV1().Deployments(namespace).Patch(context.Background(), name,
		"application/merge-patch+json", []byte(patch), meta.PatchOptions{})
	if err != nil {
		n.Fatal(err)
	}
}

// ready waits until there are exactly so many pods, and all are ready.
func (n *node) ready(count int) []core.Pod {
	n.Helper()
	var pods []core.Pod
	n.until(fmt.Sprintf("%d ready pods", count), func() error {
		list, err := n.client.CoreV1().Pods(namespace).List(context.Background(), meta.ListOptions{})
		if err != nil {
			return err
		}
		if pods = list.Items; len(pods) != count {
			return fmt.Errorf("%d pods", len(pods))
		}
		for _, pod := range pods {
			for _, condition := range pod.Status.Conditions {
				if condition.Type == core.PodReady && condition.Status != core.ConditionTrue {
					return fmt.Errorf("%s is not ready: %+v", pod.Name, pod.Status)
				}
			}
			if pod.Status.Phase != core.PodRunning {
				return fmt.Errorf("%s: %s", pod.Name, pod.Status.Phase)
			}
		}
		return nil
	})
	return pods
}

// service waits until the Service has the address of a load balancer.
func (n *node) service() *core.Service {
	n.Helper()
	var service *core.Service
	n.until("an address of a load balancer", func() (err error) {
		service, err = n.client.CoreV1().Services(namespace).Get(context.Background(), name, meta.GetOptions{})
		if err == nil && len(service.Status.LoadBalancer.Ingress) == 0 {
			err = errors.New("none")
		}
		return err
	})
	return service
}

func (n *node) exec(pod string, command ...string) (string, error) {
	request := n.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(namespace).Name(pod).
		SubResource("exec").VersionedParams(
		&core.PodExecOptions{Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewSPDYExecutor(n.config, http.MethodPost, request.URL())
	if err != nil {
		return "", err
	}
	var output, problems bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), extended(deadline))
	defer cancel()
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &output, Stderr: &problems})
	if err != nil {
		err = fmt.Errorf("%w: %s", err, problems.String())
	}
	return output.String(), err
}

// logs checks that the log of a pod arrives, also through a client that follows it.
func (n *node) logs(pod string) {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), extended(deadline))
	defer cancel()
	stream, err := n.client.CoreV1().Pods(namespace).GetLogs(pod, &core.PodLogOptions{Follow: true}).Stream(ctx)
	if err != nil {
		n.Error(err)
		return
	}
	defer stream.Close()
	first := make([]byte, len("serving"))
	if _, err := io.ReadFull(stream, first); err != nil || string(first) != "serving" {
		n.Errorf("the log begins with %q: %v", first, err)
	}
}

// forward checks a request through a forwarded port.
func (n *node) forward(pod string) {
	n.Helper()
	url := n.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(namespace).Name(pod).
		SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(n.config)
	if err != nil {
		n.Fatal(err)
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	stop, ready := make(chan struct{}), make(chan struct{})
	forwarder, err := portforward.New(dialer, []string{"0:8080"}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		n.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() { failed <- forwarder.ForwardPorts() }()
	defer close(stop)
	select {
	case err := <-failed:
		n.Errorf("port-forward: %v", err)
		return
	case <-time.After(extended(deadline)):
		n.Error("port-forward: no connection")
		return
	case <-ready:
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		n.Error(err)
		return
	}
	body, err := get(fmt.Sprintf("http://127.0.0.1:%d/", ports[0].Local))
	if err != nil || !strings.Contains(body, "Hostname="+pod) {
		n.Errorf("a forwarded request: %q, %v", body, err)
	}
}

func get(url string) (string, error) {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// fatal is an error that ends waiting.
type fatal struct{ error }

// until repeats `try` until it succeeds.
func (n *node) until(what string, try func() error) {
	n.Helper()
	for end := time.Now().Add(extended(deadline)); ; time.Sleep(50 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if stop := (fatal{}); errors.As(err, &stop) || time.Now().After(end) {
			n.Fatalf("no %s: %v", what, err)
		}
	}
}
