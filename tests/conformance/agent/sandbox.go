package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
)

// Container is the command of this binary that becomes the program of a container.
const Container = "container"

// path is where programs are searched.
const path = "/app:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// sandbox is all that a container needs to start, apart from its network.
type sandbox struct {
	Hostname    string
	Arguments   []string
	Environment []string
	Folder      string
	User, Group int64
	Groups      []int
	Mounts      []mount
	Files       map[string]string
}

// mount is a file or folder of this machine that is visible in the container.
type mount struct {
	Source, Target string
	ReadOnly       bool
}

func (c *container) newSandbox(ctx context.Context) (*sandbox, error) {
	image, err := c.image()
	if err != nil {
		return nil, err
	}
	p := c.pod.object
	box := &sandbox{Hostname: p.Name, Folder: c.spec.WorkingDir, User: image.User, Group: image.User}
	if box.Folder == "" {
		box.Folder = "/"
	}
	if security := p.Spec.SecurityContext; security != nil {
		override(&box.User, security.RunAsUser)
		override(&box.Group, security.RunAsGroup)
		if security.FSGroup != nil {
			box.Groups = append(box.Groups, int(*security.FSGroup))
		}
	}
	if security := c.spec.SecurityContext; security != nil {
		override(&box.User, security.RunAsUser)
		override(&box.Group, security.RunAsGroup)
		if security.RunAsNonRoot != nil && *security.RunAsNonRoot && box.User == 0 {
			return nil, errors.New("runAsNonRoot is set, and the user is root")
		}
	}
	variables, err := c.environment(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range variables.names {
		box.Environment = append(box.Environment, name+"="+variables.values[name])
	}
	entrypoint := image.Entrypoint
	if len(c.spec.Command) > 0 {
		entrypoint = c.spec.Command
	}
	for _, argument := range append(append([]string{}, entrypoint...), c.spec.Args...) {
		box.Arguments = append(box.Arguments, variables.expand(argument))
	}
	for _, folder := range []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl"} {
		box.Mounts = append(box.Mounts, mount{folder, folder, true})
	}
	for name, file := range image.Files {
		box.Mounts = append(box.Mounts, mount{file, "/app/" + name, true})
	}
	for _, one := range c.spec.VolumeMounts {
		source, ok := c.pod.volumes[one.Name]
		if !ok {
			return nil, fmt.Errorf("volumeMounts: no volume %q", one.Name)
		}
		subPath := one.SubPath
		if one.SubPathExpr != "" {
			subPath = variables.expand(one.SubPathExpr)
		}
		box.Mounts = append(box.Mounts, mount{filepath.Join(source, subPath), one.MountPath, one.ReadOnly})
	}
	address := c.pod.space.address
	box.Files = map[string]string{
		"/etc/passwd":        fmt.Sprintf("root:x:0:0:root:/root:/bin/sh\napp:x:%d:%d:app:/:/bin/sh\n", box.User, box.Group),
		"/etc/group":         fmt.Sprintf("root:x:0:\napp:x:%d:\n", box.Group),
		"/etc/nsswitch.conf": "hosts: files dns\n",
		"/etc/hostname":      p.Name + "\n",
		"/etc/hosts":         fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", address, p.Name),
		"/etc/resolv.conf":   c.pod.resolver(),
	}
	return box, nil
}

func override(value *int64, by *int64) {
	if by != nil {
		*value = *by
	}
}

// resolver returns the configuration of the DNS client.
func (p *pod) resolver() string {
	if p.object.Spec.DNSPolicy == core.DNSDefault {
		return ""
	}
	return fmt.Sprintf("nameserver %s\nsearch %s.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n",
		p.agent.DNS, p.object.Namespace)
}

// RunContainer becomes the program of a container, which the file in the first argument describes. It runs as the first
// process of new mount and process namespaces.
func RunContainer(arguments []string) error {
	text, err := os.ReadFile(arguments[0])
	if err != nil {
		return err
	}
	var box sandbox
	if err := json.Unmarshal(text, &box); err != nil {
		return err
	}
	if err := box.enter(filepath.Dir(arguments[0])); err != nil {
		return err
	}
	program := box.Arguments[0]
	if !strings.Contains(program, "/") {
		if err := os.Setenv("PATH", path); err != nil {
			return err
		}
		if program, err = exec.LookPath(program); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s: %w", program, syscall.Exec(program, box.Arguments, box.Environment))
}

// enter replaces the file system by that of the container, below an empty folder, and becomes its user.
func (box *sandbox) enter(folder string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	root := filepath.Join(folder, "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	for _, name := range []string{"/proc", "/dev", "/tmp", "/etc", "/root", "/var", "/run", "/app"} {
		if err := os.MkdirAll(root+name, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(root+"/tmp", 0o1777); err != nil {
		return err
	}
	if err := os.Symlink("../run", root+"/var/run"); err != nil {
		return err
	}
	if err := unix.Mount("proc", root+"/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("/proc: %w", err)
	}
	if err := unix.Mount("/dev", root+"/dev", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("/dev: %w", err)
	}
	for name, text := range box.Files {
		if err := os.WriteFile(root+name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, one := range box.Mounts {
		if err := one.make(root); err != nil {
			return fmt.Errorf("mount of %s: %w", one.Target, err)
		}
	}
	if err := unix.Sethostname([]byte(box.Hostname)); err != nil {
		return err
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	if err := os.Chdir(box.Folder); err != nil {
		return err
	}
	if err := syscall.Setgroups(box.Groups); err != nil {
		return err
	}
	if err := syscall.Setgid(int(box.Group)); err != nil {
		return err
	}
	return syscall.Setuid(int(box.User))
}

func (m mount) make(root string) error {
	info, err := os.Lstat(m.Source)
	if errors.Is(err, os.ErrNotExist) && strings.HasPrefix(m.Source, "/lib") {
		return nil
	}
	if err != nil {
		return err
	}
	target := root + m.Target
	if info.Mode()&os.ModeSymlink != 0 && m.Source == m.Target {
		// A folder such as /bin, which is a link to a folder that is mounted, too.
		link, err := os.Readlink(m.Source)
		if err != nil {
			return err
		}
		return os.Symlink(link, target)
	}
	if info, err = os.Stat(m.Source); err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(target, 0o755)
	} else {
		if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
			var file *os.File
			if file, err = os.OpenFile(target, os.O_CREATE, 0o644); err == nil {
				err = file.Close()
			}
		}
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(m.Source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if m.ReadOnly {
		return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	return nil
}
