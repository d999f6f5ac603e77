package agent

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// debounce is the time in which changes of Services and EndpointSlices are collected.
const debounce = 20 * time.Millisecond

// balanced is a port of a Service with the addresses of its ready endpoints.
type balanced struct {
	addresses []string
	protocol  string
	port      int32
	endpoints []string
}

// serveServices keeps the rules of cluster IPs and load balancer addresses, and assigns the latter.
func (a *Agent) serveServices(ctx context.Context, factory informers.SharedInformerFactory) error {
	services, slices := factory.Core().V1().Services(), factory.Discovery().V1().EndpointSlices()
	changed := make(chan struct{}, 1)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { notify() },
		UpdateFunc: func(_, _ any) { notify() },
		DeleteFunc: func(any) { notify() },
	}
	for _, informer := range []cache.SharedIndexInformer{services.Informer(), slices.Informer()} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}
	go func() {
		var written string
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			time.Sleep(debounce)
			known, err := services.Lister().List(labels.Everything())
			if err != nil {
				a.report("list of Services", err)
				continue
			}
			if err := a.assign(ctx, known); err != nil {
				a.report("assignment of load balancer addresses", err)
				time.AfterFunc(time.Second, notify)
			}
			endpoints, err := slices.Lister().List(labels.Everything())
			if err != nil {
				a.report("list of EndpointSlices", err)
				continue
			}
			rules := a.Network.rules(ports(known, endpoints))
			if rules == written {
				continue
			}
			if err := Restore(a.Network.Iptables, rules); err != nil {
				a.report("rules of Services", err)
				time.AfterFunc(time.Second, notify)
				continue
			}
			written = rules
		}
	}()
	return nil
}

// assign gives addresses to Services of type LoadBalancer that have none.
func (a *Agent) assign(ctx context.Context, services []*core.Service) error {
	prefix, err := netip.ParsePrefix(a.Network.Balancers)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, service := range services {
		for _, ingress := range service.Status.LoadBalancer.Ingress {
			used[ingress.IP] = true
		}
	}
	for _, service := range services {
		if service.Spec.Type != core.ServiceTypeLoadBalancer || len(service.Status.LoadBalancer.Ingress) > 0 {
			continue
		}
		// An assignment that the informer does not know yet is repeated with the same address.
		address, ok := a.balancers[string(service.UID)]
		for !ok || used[address] {
			a.balancer++
			address, ok = offset(prefix, a.balancer).String(), true
		}
		a.balancers[string(service.UID)], used[address] = address, true
		service = service.DeepCopy()
		service.Status.LoadBalancer.Ingress = []core.LoadBalancerIngress{{IP: address}}
		_, err := a.Client.CoreV1().Services(service.Namespace).UpdateStatus(ctx, service, meta.UpdateOptions{})
		if err != nil {
			return fmt.Errorf("Service %s/%s: %w", service.Namespace, service.Name, err)
		}
	}
	return nil
}

// ports returns the ports of all Services that have a virtual address.
func ports(services []*core.Service, all []*discovery.EndpointSlice) []balanced {
	of := map[string][]*discovery.EndpointSlice{}
	for _, slice := range all {
		key := slice.Namespace + "/" + slice.Labels[discovery.LabelServiceName]
		of[key] = append(of[key], slice)
	}
	var found []balanced
	for _, service := range services {
		var addresses []string
		for _, address := range service.Spec.ClusterIPs {
			if address != core.ClusterIPNone && !strings.Contains(address, ":") {
				addresses = append(addresses, address)
			}
		}
		for _, ingress := range service.Status.LoadBalancer.Ingress {
			if ingress.IP != "" {
				addresses = append(addresses, ingress.IP)
			}
		}
		addresses = append(addresses, service.Spec.ExternalIPs...)
		for _, port := range service.Spec.Ports {
			entry := balanced{addresses: addresses, protocol: strings.ToLower(string(port.Protocol)), port: port.Port}
			for _, slice := range of[service.Namespace+"/"+service.Name] {
				entry.endpoints = append(entry.endpoints, endpoints(slice, port.Name)...)
			}
			slices.Sort(entry.endpoints)
			entry.endpoints = slices.Compact(entry.endpoints)
			found = append(found, entry)
		}
	}
	sort.Slice(found, func(i, j int) bool { return fmt.Sprint(found[i]) < fmt.Sprint(found[j]) })
	return found
}

// endpoints returns the ready endpoints of a port.
func endpoints(slice *discovery.EndpointSlice, name string) []string {
	var found []string
	for _, port := range slice.Ports {
		if port.Port == nil || port.Name == nil && name != "" || port.Name != nil && *port.Name != name {
			continue
		}
		for _, endpoint := range slice.Endpoints {
			if endpoint.Conditions.Ready != nil && !*endpoint.Conditions.Ready {
				continue
			}
			for _, address := range endpoint.Addresses {
				found = append(found, fmt.Sprintf("%s:%d", address, *port.Port))
			}
		}
	}
	return found
}

// rules returns the rules of the node: virtual addresses lead to a random endpoint. Connections to a virtual address
// without one are refused.
func (n *Network) rules(ports []balanced) string {
	const mark = "0x4000"
	var chains, rules, targets strings.Builder
	for number, port := range ports {
		if len(port.endpoints) == 0 || len(port.addresses) == 0 {
			continue
		}
		chain := fmt.Sprintf("SERVICE-%d", number)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", chain)
		for _, address := range port.addresses {
			fmt.Fprintf(&rules, "-A SERVICES -d %s/32 -p %s --dport %d -j %s\n", address, port.protocol, port.port, chain)
		}
		for index, endpoint := range port.endpoints {
			choice := ""
			if remaining := len(port.endpoints) - index; remaining > 1 {
				choice = fmt.Sprintf("-m statistic --mode random --probability %.8f ", 1/float64(remaining))
			}
			target := fmt.Sprintf("ENDPOINT-%d-%d", number, index)
			fmt.Fprintf(&chains, ":%s - [0:0]\n", target)
			fmt.Fprintf(&targets, "-A %s %s-j %s\n", chain, choice, target)
			// A pod that reaches itself must see another source address.
			host, _, _ := strings.Cut(endpoint, ":")
			fmt.Fprintf(&targets, "-A %s -s %s/32 -j MARK --set-mark %s\n", target, host, mark)
			fmt.Fprintf(&targets, "-A %s -p %s -j DNAT --to-destination %s\n", target, port.protocol, endpoint)
		}
	}
	var refused strings.Builder
	for _, chain := range []string{"OUTPUT", "FORWARD"} {
		for _, virtual := range []string{n.Services, n.Balancers} {
			fmt.Fprintf(&refused, "-A %s -d %s -p tcp -j REJECT --reject-with tcp-reset\n", chain, virtual)
			fmt.Fprintf(&refused, "-A %s -d %s -j REJECT\n", chain, virtual)
		}
	}
	return "*nat\n:SERVICES - [0:0]\n" + chains.String() + "-A PREROUTING -j SERVICES\n-A OUTPUT -j SERVICES\n" +
		rules.String() + targets.String() +
		fmt.Sprintf("-A POSTROUTING -m mark --mark %s -j SNAT --to-source %s\nCOMMIT\n*filter\n", mark, n.Node) +
		refused.String() + "COMMIT\n"
}
