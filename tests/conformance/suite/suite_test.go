// Package suite is the Gateway API's conformance suite as a test binary, with a test of the node agent.
package suite

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	gateway "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/yaml"
)

const (
	// startTimeout is the time limit for the GatewayClass to appear, and for all applications of the suite to start.
	startTimeout = 5 * time.Minute
	pollInterval = 100 * time.Millisecond
)

// TestConformance runs the suite with the options in its flags.
func TestConformance(t *testing.T) {
	options := conformance.DefaultOptions(t)
	extendLimits(&options.TimeoutConfig)
	awaitClass(t, options)
	run, err := suite.NewConformanceTestSuite(options)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	run.Setup(t, tests.ConformanceTests)
	awaitDeployments(t, options.Clientset)
	fmt.Printf("applications are ready after %.1f s\n", time.Since(began).Seconds())
	if err := run.Run(t, tests.ConformanceTests); err != nil {
		t.Fatal(err)
	}
	if options.ReportOutputPath == "" {
		return
	}
	report, err := run.Report()
	if err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(report)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(options.ReportOutputPath, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// awaitClass waits until the control plane has created the GatewayClass, if a profile needs it. The suite waits for its
// status only.
func awaitClass(t *testing.T, options suite.ConformanceOptions) {
	t.Helper()
	isNeeded := false
	for _, profile := range options.ConformanceProfiles.UnsortedList() {
		isNeeded = isNeeded || strings.HasPrefix(string(profile), "GATEWAY-")
	}
	if !isNeeded {
		return
	}
	key := client.ObjectKey{Name: options.GatewayClassName}
	for end := time.Now().Add(extended(startTimeout)); ; time.Sleep(pollInterval) {
		err := options.Client.Get(context.Background(), key, &gateway.GatewayClass{})
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("GatewayClass %s: %v", key.Name, err)
		}
	}
}

// awaitDeployments waits until all replicas of all Deployments are available. The suite itself waits for the pods that
// exist: right after it has created Deployments, there may be none.
func awaitDeployments(t *testing.T, set kubernetes.Interface) {
	t.Helper()
	for end := time.Now().Add(extended(startTimeout)); ; time.Sleep(pollInterval) {
		list, err := set.AppsV1().Deployments("").List(context.Background(), meta.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		waiting := ""
		for _, deployment := range list.Items {
			status := deployment.Status
			if status.ObservedGeneration < deployment.Generation || status.AvailableReplicas < *deployment.Spec.Replicas {
				waiting = deployment.Namespace + "/" + deployment.Name
				break
			}
		}
		if waiting == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("Deployment %s is not available", waiting)
		}
	}
}
