package agent

import (
	"context"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// variables are environment variables in their order.
type variables struct {
	names  []string
	values map[string]string
}

func (v *variables) set(name, value string) {
	if _, ok := v.values[name]; !ok {
		v.names = append(v.names, name)
	}
	v.values[name] = value
}

var reference = regexp.MustCompile(`\$\$|\$\([A-Za-z_.-][A-Za-z0-9_.-]*\)`)

// expand replaces `$(NAME)` by the variable, and `$$` by `$`. Unknown names stay.
func (v *variables) expand(text string) string {
	return reference.ReplaceAllStringFunc(text, func(found string) string {
		if found == "$$" {
			return "$"
		}
		if value, ok := v.values[found[2:len(found)-1]]; ok {
			return value
		}
		return found
	})
}

// environment returns the environment of the container.
func (c *container) environment(ctx context.Context) (*variables, error) {
	v := &variables{values: map[string]string{}}
	v.set("PATH", path)
	v.set("HOME", "/")
	v.set("HOSTNAME", c.pod.object.Name)
	v.set("KUBERNETES_SERVICE_HOST", "10.96.0.1")
	v.set("KUBERNETES_SERVICE_PORT", "443")
	namespace := c.pod.object.Namespace
	for _, source := range c.spec.EnvFrom {
		var data map[string]string
		var err error
		switch {
		case source.ConfigMapRef != nil:
			data, err = c.pod.agent.configMap(ctx, namespace, source.ConfigMapRef.Name, source.ConfigMapRef.Optional)
		case source.SecretRef != nil:
			data, err = c.pod.agent.secret(ctx, namespace, source.SecretRef.Name, source.SecretRef.Optional)
		}
		if err != nil {
			return nil, fmt.Errorf("envFrom: %w", err)
		}
		for name, value := range data {
			v.set(source.Prefix+name, value)
		}
	}
	for _, variable := range c.spec.Env {
		if variable.ValueFrom == nil {
			v.set(variable.Name, v.expand(variable.Value))
			continue
		}
		value, ok, err := c.resolve(ctx, variable.ValueFrom)
		if err != nil {
			return nil, fmt.Errorf("env %s: %w", variable.Name, err)
		}
		if ok {
			v.set(variable.Name, value)
		}
	}
	return v, nil
}

// resolve returns the value of a source, and false if it is optional and absent.
func (c *container) resolve(ctx context.Context, source *core.EnvVarSource) (string, bool, error) {
	agent, namespace := c.pod.agent, c.pod.object.Namespace
	switch {
	case source.FieldRef != nil:
		value, err := c.pod.field(source.FieldRef.FieldPath)
		return value, true, err
	case source.ResourceFieldRef != nil:
		value, err := resourceField(c.spec, source.ResourceFieldRef)
		return value, true, err
	case source.ConfigMapKeyRef != nil:
		from := source.ConfigMapKeyRef
		data, err := agent.configMap(ctx, namespace, from.Name, from.Optional)
		return key(data, from.Key, from.Optional, err)
	case source.SecretKeyRef != nil:
		from := source.SecretKeyRef
		data, err := agent.secret(ctx, namespace, from.Name, from.Optional)
		return key(data, from.Key, from.Optional, err)
	}
	return "", false, fmt.Errorf("unknown source %v", source)
}

func key(data map[string]string, name string, optional *bool, err error) (string, bool, error) {
	if err != nil {
		return "", false, err
	}
	value, ok := data[name]
	if !ok && (optional == nil || !*optional) {
		return "", false, fmt.Errorf("no key %q", name)
	}
	return value, ok, nil
}

// field returns a field of the pod for the downward API.
func (p *pod) field(fieldPath string) (string, error) {
	object := p.object
	if name, subscript, ok := strings.Cut(fieldPath, "["); ok {
		subscript = strings.Trim(subscript, "]'\"")
		switch name {
		case "metadata.labels":
			return object.Labels[subscript], nil
		case "metadata.annotations":
			return object.Annotations[subscript], nil
		}
	}
	switch fieldPath {
	case "metadata.name":
		return object.Name, nil
	case "metadata.namespace":
		return object.Namespace, nil
	case "metadata.uid":
		return string(object.UID), nil
	case "metadata.labels":
		return lines(object.Labels), nil
	case "metadata.annotations":
		return lines(object.Annotations), nil
	case "spec.nodeName":
		return nodeName, nil
	case "spec.serviceAccountName":
		return object.Spec.ServiceAccountName, nil
	case "status.podIP", "status.podIPs":
		return p.space.address, nil
	case "status.hostIP", "status.hostIPs":
		return p.agent.Network.Node, nil
	}
	return "", fmt.Errorf("unknown field %q", fieldPath)
}

// lines returns labels or annotations as a file of the downward API.
func lines(values map[string]string) string {
	var text []string
	for name, value := range values {
		text = append(text, name+"="+strconv.Quote(value))
	}
	slices.Sort(text)
	return strings.Join(text, "\n")
}

// resourceField returns a limit or request in units of its divisor, rounded up. Without a limit, it returns that of the
// node.
func resourceField(spec *core.Container, selector *core.ResourceFieldSelector) (string, error) {
	group, name, _ := strings.Cut(selector.Resource, ".")
	list := spec.Resources.Limits
	if group == "requests" {
		list = spec.Resources.Requests
	}
	quantity, ok := list[core.ResourceName(name)]
	if !ok && group == "limits" {
		switch core.ResourceName(name) {
		case core.ResourceCPU:
			quantity = *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI)
		case core.ResourceMemory:
			quantity = resource.MustParse("8Gi")
		}
	}
	divisor := selector.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	unit := divisor.MilliValue()
	return strconv.FormatInt((quantity.MilliValue()+unit-1)/unit, 10), nil
}

// configMap returns the data of a ConfigMap; nothing if it is absent and optional.
func (a *Agent) configMap(ctx context.Context, namespace, name string, optional *bool) (map[string]string, error) {
	found, err := a.Client.CoreV1().ConfigMaps(namespace).Get(ctx, name, meta.GetOptions{})
	if errors.IsNotFound(err) && optional != nil && *optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	data := found.Data
	for name, value := range found.BinaryData {
		if data == nil {
			data = map[string]string{}
		}
		data[name] = string(value)
	}
	return data, nil
}

// secret returns the data of a Secret; nothing if it is absent and optional.
func (a *Agent) secret(ctx context.Context, namespace, name string, optional *bool) (map[string]string, error) {
	found, err := a.Client.CoreV1().Secrets(namespace).Get(ctx, name, meta.GetOptions{})
	if errors.IsNotFound(err) && optional != nil && *optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	data := map[string]string{}
	for name, value := range found.Data {
		data[name] = string(value)
	}
	return data, nil
}
