package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// gateway is the next hop of every pod. Only its hardware address matters.
	gateway         = "169.254.1.1"
	gatewayHardware = "02:00:00:00:00:01"
)

// Network is the network of a node and its pods. Each pod has a device of its own on the node, so that all traffic
// passes the rules of the node.
type Network struct {
	// Node is the address of the node.
	Node string
	// Pods, Services and Balancers are the ranges of pod, cluster and load balancer addresses.
	Pods, Services, Balancers string
	// Iptables is the folder with iptables and its libraries.
	Iptables string

	mutex sync.Mutex
	pods  uint32
}

// Prepare sets up the namespace of the node, in which the caller runs.
func (n *Network) Prepare() error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil {
		return err
	}
	commands := fmt.Sprintf("link set lo up\naddr add %s/32 dev lo\n", n.Node)
	// Packets to these addresses have a source address before the rules give them another destination.
	for _, virtual := range []string{n.Services, n.Balancers} {
		commands += fmt.Sprintf("route add %s dev lo src %s\n", virtual, n.Node)
	}
	return ip(commands)
}

// ip runs commands of the program `ip` in the namespace of the current thread.
func ip(commands string) error {
	return input("ip", commands, nil, "-batch", "-")
}

// input runs a program with a text as its standard input.
func input(program, text string, environment []string, arguments ...string) error {
	command := exec.Command(program, arguments...)
	command.Stdin = strings.NewReader(text)
	command.Env = append(os.Environ(), environment...)
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	if err := command.Run(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", program, strings.Join(arguments, " "), err, output.String())
	}
	return nil
}

// Restore replaces the rules of the tables in a text for iptables-restore, in the namespace of the current thread.
func Restore(folder, rules string) error {
	libraries, err := filepath.Glob(filepath.Join(folder, "usr/lib/*-linux-gnu"))
	if err != nil || len(libraries) == 0 {
		return fmt.Errorf("no iptables in %s", folder)
	}
	environment := []string{"LD_LIBRARY_PATH=" + libraries[0], "XTABLES_LIBDIR=" + filepath.Join(libraries[0], "xtables")}
	program := filepath.Join(folder, "usr/sbin/xtables-legacy-multi")
	if err := input(program, rules, environment, "iptables-restore"); err != nil {
		return fmt.Errorf("%w\n%s", err, rules)
	}
	return nil
}

// namespace is a network namespace. It ends when it is closed and no process is in it.
type namespace struct {
	file    *os.File
	address string
	device  string
}

// enter runs `do` on a thread inside the namespace. Processes that it starts are in the namespace, too.
func (n *namespace) enter(do func() error) error {
	result := make(chan error, 1)
	go func() {
		// The thread ends with this goroutine, because it stays locked.
		runtime.LockOSThread()
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			result <- fmt.Errorf("setns: %w", err)
			return
		}
		result <- do()
	}()
	return <-result
}

func newNamespace() (*namespace, error) {
	type outcome struct {
		file *os.File
		err  error
	}
	result := make(chan outcome, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			result <- outcome{nil, fmt.Errorf("unshare: %w", err)}
			return
		}
		file, err := os.Open("/proc/thread-self/ns/net")
		result <- outcome{file, err}
	}()
	made := <-result
	if made.err != nil {
		return nil, made.err
	}
	return &namespace{file: made.file}, nil
}

// address returns the next free address and its number.
func (n *Network) address() (netip.Addr, uint32, error) {
	prefix, err := netip.ParsePrefix(n.Pods)
	if err != nil {
		return netip.Addr{}, 0, err
	}
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.pods++
	return offset(prefix, n.pods+1), n.pods, nil
}

// offset returns an address of a range by its number.
func offset(prefix netip.Prefix, number uint32) netip.Addr {
	bytes := prefix.Masked().Addr().As4()
	binary.BigEndian.PutUint32(bytes[:], binary.BigEndian.Uint32(bytes[:])+number)
	return netip.AddrFrom4(bytes)
}

// attach creates the namespace of a pod and connects it to the node. `settings` are kernel parameters.
func (n *Network) attach(settings map[string]string) (*namespace, error) {
	address, number, err := n.address()
	if err != nil {
		return nil, err
	}
	space, err := newNamespace()
	if err != nil {
		return nil, err
	}
	space.address, space.device = address.String(), fmt.Sprintf("pod%d", number)
	bytes := address.As4()
	hardware := fmt.Sprintf("02:00:%02x:%02x:%02x:%02x", bytes[0], bytes[1], bytes[2], bytes[3])
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), space.file.Fd())
	err = ip(fmt.Sprintf("link add %[1]s address %[2]s type veth peer name eth0 address %[3]s netns %[4]s\n"+
		"link set %[1]s up\nneigh add %[5]s lladdr %[3]s dev %[1]s nud permanent\nroute add %[5]s dev %[1]s src %[6]s\n",
		space.device, gatewayHardware, hardware, path, space.address, n.Node))
	if err == nil {
		err = space.enter(func() error {
			for name, value := range settings {
				if err := os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0o644); err != nil {
					return err
				}
			}
			return ip(fmt.Sprintf("link set lo up\naddr add %[1]s/32 dev eth0\nlink set eth0 up\n"+
				"route add %[2]s dev eth0 scope link\nneigh add %[2]s lladdr %[3]s dev eth0 nud permanent\n"+
				"route add default via %[2]s dev eth0\n", space.address, gateway, gatewayHardware))
		})
	}
	if err != nil {
		n.detach(space)
		return nil, err
	}
	return space, nil
}

// detach removes the device of a pod. Its namespace ends with its processes.
func (n *Network) detach(space *namespace) {
	// The device is already gone if the namespace ended first.
	_ = ip("link del " + space.device + "\n")
	_ = space.file.Close()
}
