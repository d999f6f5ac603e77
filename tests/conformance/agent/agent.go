// Package agent is a node of a Kubernetes cluster: it runs pods as network namespaces with their containers as
// processes, implements Services, and serves exec, logs and port-forward. It trusts all that it is asked to run.
package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// nodeName is the name of the only node.
const nodeName = "node"

// Agent is the agent of the only node, which also binds pods to it.
type Agent struct {
	Client  kubernetes.Interface
	Network *Network
	// Folder has the volumes and logs of pods.
	Folder string
	// DNS is the address of the cluster's DNS server.
	DNS string
	// Images are the programs that replace images, by the last part of an image's name without its tag.
	Images map[string]Image

	mutex sync.Mutex
	pods  map[types.UID]*pod

	balancers map[string]string
	balancer  uint32
}

// Image is a program that replaces an image.
type Image struct {
	Entrypoint []string
	// User runs the program unless the pod names one.
	User int64
	// Files are programs and folders of this machine that are mounted in `/app`.
	Files map[string]string
}

// Start registers the node and runs its pods until the context ends.
func (a *Agent) Start(ctx context.Context) error {
	a.pods, a.balancers = map[types.UID]*pod{}, map[string]string{}
	if err := a.serveKubelet(); err != nil {
		return err
	}
	if err := a.register(ctx); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(a.Client, 0)
	if err := a.serveServices(ctx, factory); err != nil {
		return err
	}
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { a.see(ctx, object) },
		UpdateFunc: func(_, object any) { a.see(ctx, object) },
		DeleteFunc: a.forget,
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return nil
}

func (a *Agent) report(what string, err error) {
	fmt.Fprintf(os.Stderr, "node agent: %s: %v\n", what, err)
}

func (a *Agent) register(ctx context.Context) error {
	node := &core.Node{ObjectMeta: meta.ObjectMeta{Name: nodeName, Labels: map[string]string{
		core.LabelHostname: nodeName, core.LabelOSStable: "linux",
	}}}
	node, err := a.Client.CoreV1().Nodes().Create(ctx, node, meta.CreateOptions{})
	if err != nil {
		return err
	}
	resources := core.ResourceList{
		core.ResourceCPU: resource.MustParse("2"), core.ResourceMemory: resource.MustParse("8Gi"),
		core.ResourcePods: resource.MustParse("1000"),
	}
	now := meta.Now()
	node.Status = core.NodeStatus{
		Capacity: resources, Allocatable: resources,
		Addresses: []core.NodeAddress{
			{Type: core.NodeInternalIP, Address: a.Network.Node}, {Type: core.NodeHostName, Address: nodeName},
		},
		DaemonEndpoints: core.NodeDaemonEndpoints{KubeletEndpoint: core.DaemonEndpoint{Port: kubeletPort}},
		Conditions: []core.NodeCondition{{
			Type: core.NodeReady, Status: core.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: now,
			LastTransitionTime: now,
		}},
	}
	_, err = a.Client.CoreV1().Nodes().UpdateStatus(ctx, node, meta.UpdateOptions{})
	return err
}

// see handles a new or changed pod.
func (a *Agent) see(ctx context.Context, object any) {
	seen, ok := object.(*core.Pod)
	if !ok {
		return
	}
	if seen.Spec.NodeName == "" {
		if seen.DeletionTimestamp == nil {
			go a.bind(ctx, seen)
		}
		return
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	running := a.pods[seen.UID]
	// A pod that has ended stays in the map until its object is removed.
	if running == nil {
		running = newPod(a, seen)
		a.pods[seen.UID] = running
		go running.run(ctx)
	}
	if seen.DeletionTimestamp != nil {
		running.end(seen)
	}
}

// bind assigns a pod to the node, as a scheduler does.
func (a *Agent) bind(ctx context.Context, pod *core.Pod) {
	binding := &core.Binding{
		ObjectMeta: meta.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     core.ObjectReference{Kind: "Node", Name: nodeName},
	}
	// An error means that the pod is gone or already bound.
	_ = a.Client.CoreV1().Pods(pod.Namespace).Bind(ctx, binding, meta.CreateOptions{})
}

// forget handles a pod that was removed.
func (a *Agent) forget(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	gone, ok := object.(*core.Pod)
	if !ok {
		return
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if running := a.pods[gone.UID]; running != nil {
		delete(a.pods, gone.UID)
		now := int64(0)
		gone = gone.DeepCopy()
		gone.DeletionGracePeriodSeconds = &now
		running.end(gone)
	}
}

// find returns a running pod by its name.
func (a *Agent) find(namespace, name string) *pod {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for _, running := range a.pods {
		if running.object.Namespace == namespace && running.object.Name == name {
			return running
		}
	}
	return nil
}

// log returns the path of a container's log.
func (a *Agent) log(pod *core.Pod, container string) string {
	return filepath.Join(a.Folder, "logs", fmt.Sprintf("%s_%s_%s.log", pod.Namespace, pod.Name, container))
}

// sleep waits, or returns false if the context ends first.
func sleep(ctx context.Context, duration time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(duration):
		return true
	}
}
