package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"conformance/agent"
)

const system = "istio-system"

// images returns the programs that replace images, by the last part of the image's name.
func images(o *options) map[string]agent.Image {
	bin := func(name string) string { return filepath.Join(o.tools, "bin", name) }
	self := bin("cluster")
	return map[string]agent.Image{
		"coredns":    {Entrypoint: []string{"/app/coredns"}, Files: map[string]string{"coredns": bin("coredns")}},
		"echo-basic": {Entrypoint: []string{"/app/echo-basic"}, Files: map[string]string{"echo-basic": bin("echo-basic")}},
		"echo-advanced": {
			Entrypoint: []string{"/app/echo"},
			Files:      map[string]string{"echo": self, "client": self},
		},
		"pilot": {
			Entrypoint: []string{"/app/pilot-discovery"}, User: 1337,
			Files: map[string]string{"pilot-discovery": o.istiod},
		},
		"proxyv2": {
			Entrypoint: []string{"/app/pilot-agent"},
			Files: map[string]string{
				"pilot-agent": self,
				"envoy":       filepath.Join(o.tools, "py/bin/envoy"),
				"iptables":    filepath.Join(o.tools, "iptables"),
			},
		},
	}
}

const corefile = `.:53 {
  errors
  ready
  kubernetes cluster.local in-addr.arpa {
    pods insecure
  }
}
`

// installDNS creates the DNS server of the cluster and waits for its first answer.
func installDNS(ctx context.Context, client kubernetes.Interface) error {
	const namespace, name = "kube-system", "coredns"
	labels := map[string]string{"k8s-app": "kube-dns"}
	metadata := meta.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}
	var options meta.CreateOptions
	_, err := client.CoreV1().ServiceAccounts(namespace).Create(ctx, &core.ServiceAccount{ObjectMeta: metadata}, options)
	if err != nil {
		return err
	}
	role := &rbac.ClusterRole{ObjectMeta: meta.ObjectMeta{Name: name}, Rules: []rbac.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"endpoints", "services", "pods", "namespaces"},
			Verbs: []string{"list", "watch"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
	}}
	if _, err := client.RbacV1().ClusterRoles().Create(ctx, role, options); err != nil {
		return err
	}
	binding := &rbac.ClusterRoleBinding{
		ObjectMeta: meta.ObjectMeta{Name: name},
		RoleRef:    rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbac.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: name}},
	}
	if _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, binding, options); err != nil {
		return err
	}
	file := &core.ConfigMap{ObjectMeta: metadata, Data: map[string]string{"Corefile": corefile}}
	if _, err := client.CoreV1().ConfigMaps(namespace).Create(ctx, file, options); err != nil {
		return err
	}
	service := &core.Service{
		ObjectMeta: meta.ObjectMeta{Namespace: namespace, Name: "kube-dns", Labels: labels},
		Spec: core.ServiceSpec{ClusterIP: dnsAddress, Selector: labels, Ports: []core.ServicePort{
			{Name: "dns", Port: 53, Protocol: core.ProtocolUDP}, {Name: "dns-tcp", Port: 53, Protocol: core.ProtocolTCP},
		}},
	}
	if _, err := client.CoreV1().Services(namespace).Create(ctx, service, options); err != nil {
		return err
	}
	container := core.Container{
		Name: name, Image: "registry.k8s.io/coredns/coredns:v1.12.2", Args: []string{"-conf", "/etc/coredns/Corefile"},
		VolumeMounts: []core.VolumeMount{{Name: "config", MountPath: "/etc/coredns"}},
		ReadinessProbe: &core.Probe{PeriodSeconds: 1, ProbeHandler: core.ProbeHandler{
			HTTPGet: &core.HTTPGetAction{Path: "/ready", Port: intstr.FromInt32(8181)},
		}},
	}
	volume := core.Volume{Name: "config", VolumeSource: core.VolumeSource{
		ConfigMap: &core.ConfigMapVolumeSource{LocalObjectReference: core.LocalObjectReference{Name: name}},
	}}
	deployment := &apps.Deployment{ObjectMeta: metadata, Spec: apps.DeploymentSpec{
		Selector: &meta.LabelSelector{MatchLabels: labels},
		Template: core.PodTemplateSpec{ObjectMeta: meta.ObjectMeta{Labels: labels}, Spec: core.PodSpec{
			ServiceAccountName: name, DNSPolicy: core.DNSDefault,
			Containers: []core.Container{container}, Volumes: []core.Volume{volume},
		}},
	}}
	if _, err := client.AppsV1().Deployments(namespace).Create(ctx, deployment, options); err != nil {
		return err
	}
	return until("a DNS answer", startTimeout, func() error {
		resolve, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := (&net.Resolver{PreferGo: true}).LookupHost(resolve, "kubernetes.default.svc.cluster.local")
		return err
	})
}

// installMesh creates the CRDs of the Gateway API, installs both charts and waits until istiod is ready.
func installMesh(ctx context.Context, o *options, config *rest.Config) error {
	if err := createCRDs(ctx, filepath.Join(o.tools, "gateway-api"), config); err != nil {
		return fmt.Errorf("CRDs of the Gateway API: %w", err)
	}
	namespace := []string{"--namespace", system, "--create-namespace"}
	if err := helm(o, append([]string{"install", "istio-base", "base"}, namespace...)...); err != nil {
		return err
	}
	arguments := append([]string{"install", "istiod", "istiod", "--wait", "--timeout", "3m"}, namespace...)
	values := append([]string{"global.hub=cluster.local", "autoscaleEnabled=false"}, o.values...)
	for _, value := range values {
		arguments = append(arguments, "--set", value)
	}
	return helm(o, arguments...)
}

func helm(o *options, arguments ...string) error {
	command := exec.Command(filepath.Join(o.tools, "bin/helm"), arguments...)
	command.Dir = o.charts
	command.Env = []string{"KUBECONFIG=" + kubeconfig(o), "PATH=" + os.Getenv("PATH"), rareCollection}
	for _, name := range []string{"HOME", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"} {
		command.Env = append(command.Env, name+"="+filepath.Join(o.folder, "helm"))
	}
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("helm %s: %w\n%s", strings.Join(arguments, " "), err, output)
	}
	return nil
}

func createCRDs(ctx context.Context, folder string, config *rest.Config) error {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	crds := client.Resource(schema.GroupVersionResource{
		Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions",
	})
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("%s is empty", folder)
	}
	force := true
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var object unstructured.Unstructured
		if err := yaml.Unmarshal(text, &object.Object); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if object.GetKind() != "CustomResourceDefinition" {
			continue
		}
		_, err = crds.Patch(ctx, object.GetName(), types.ApplyPatchType, text,
			meta.PatchOptions{FieldManager: "cluster", Force: &force})
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		names = append(names, object.GetName())
	}
	for _, name := range names {
		err := until("an established CRD "+name, startTimeout, func() error {
			object, err := crds.Get(ctx, name, meta.GetOptions{})
			if err != nil {
				return err
			}
			conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
			for _, condition := range conditions {
				fields, _ := condition.(map[string]any)
				if fields["type"] == "Established" && fields["status"] == "True" {
					return nil
				}
			}
			return fmt.Errorf("conditions %v", conditions)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
