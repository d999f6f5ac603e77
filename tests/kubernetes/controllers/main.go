// Program controllers runs the controllers of Kubernetes that a cluster with one node needs, in one process.
// kube-controller-manager has 40 more, with 300 packages that nothing else here needs: `make tools` took a twelfth
// longer with it.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/controller-manager/pkg/informerfactory"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/certificates/rootcacertpublisher"
	"k8s.io/kubernetes/pkg/controller/deployment"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
	"k8s.io/kubernetes/pkg/controller/namespace"
	"k8s.io/kubernetes/pkg/controller/replicaset"
	"k8s.io/kubernetes/pkg/controller/serviceaccount"
)

const (
	// workers is the number of objects that a controller handles at the same time.
	workers = 10
	// period is the time between two readings of the kinds that the API server has, and between two checks of all
	// namespaces.
	period = 30 * time.Second
	// slice is the maximum number of endpoints in a slice, the default of Kubernetes.
	slice = 100
)

func main() {
	path := flag.String("kubeconfig", "", "file with the address of the API server")
	authority := flag.String("root-ca-file", "", "certificate that the ConfigMaps kube-root-ca.crt contain")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *path, *authority); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, path, authority string) error {
	root, err := os.ReadFile(authority)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 500, 1000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		return err
	}
	objects := informers.NewSharedInformerFactory(client, 0)
	started := make(chan struct{})

	deployments, err := deployment.NewDeploymentController(ctx, objects.Apps().V1().Deployments(),
		objects.Apps().V1().ReplicaSets(), objects.Core().V1().Pods(), client)
	if err != nil {
		return err
	}
	replicas := replicaset.NewReplicaSetController(ctx, objects.Apps().V1().ReplicaSets(), objects.Core().V1().Pods(),
		client, replicaset.BurstReplicas)
	slices := endpointslice.NewController(ctx, objects.Core().V1().Pods(), objects.Core().V1().Services(),
		objects.Core().V1().Nodes(), objects.Discovery().V1().EndpointSlices(), slice, client, 0)
	accounts, err := serviceaccount.NewServiceAccountsController(klog.FromContext(ctx),
		objects.Core().V1().ServiceAccounts(), objects.Core().V1().Namespaces(), client,
		serviceaccount.DefaultServiceAccountsControllerOptions())
	if err != nil {
		return err
	}
	roots, err := rootcacertpublisher.NewPublisher(objects.Core().V1().ConfigMaps(), objects.Core().V1().Namespaces(),
		client, root)
	if err != nil {
		return err
	}
	collect, err := collector(ctx, client, metadataClient, objects, started)
	if err != nil {
		return err
	}
	namespaces := namespace.NewNamespaceController(ctx, client, metadataClient,
		client.Discovery().ServerPreferredNamespacedResources, objects.Core().V1().Namespaces(), period,
		core.FinalizerKubernetes)

	go deployments.Run(ctx, workers)
	go replicas.Run(ctx, workers)
	go slices.Run(ctx, workers)
	go accounts.Run(ctx, 1)
	go roots.Run(ctx, 1)
	go namespaces.Run(ctx, workers)
	go collect()
	objects.Start(ctx.Done())
	close(started)
	<-ctx.Done()
	return nil
}

// collector returns the garbage collector as a function. It waits for `started`, as it adds informers of its own to the
// objects that the others watch.
func collector(ctx context.Context, client kubernetes.Interface, metadataClient metadata.Interface,
	objects informers.SharedInformerFactory, started <-chan struct{}) (func(), error) {
	kinds := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	all := informerfactory.NewInformerFactory(objects, metadatainformer.NewSharedInformerFactory(metadataClient, 0))
	graph := garbagecollector.NewDependencyGraphBuilder(ctx, metadataClient, kinds,
		garbagecollector.DefaultIgnoredResources(), all, started)
	garbage, err := garbagecollector.NewComposedGarbageCollector(ctx, client, metadataClient, kinds, graph)
	if err != nil {
		return nil, err
	}
	return func() {
		go wait.Until(kinds.Reset, period, ctx.Done())
		go garbage.Run(ctx, workers, period)
		garbage.Sync(ctx, client.Discovery(), period)
	}, nil
}
