package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	authentication "k8s.io/api/authentication/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// mountAll creates the volumes and returns their folders. Their content stays as it is at the start of the pod.
func (p *pod) mountAll(ctx context.Context) (map[string]string, error) {
	folders := map[string]string{}
	for _, volume := range p.object.Spec.Volumes {
		folder := filepath.Join(p.folder(), "volumes", volume.Name)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return nil, err
		}
		// Containers with other users write into volumes without files.
		mode := os.FileMode(0o777)
		files, err := p.files(ctx, &volume.VolumeSource)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", volume.Name, err)
		}
		if files != nil {
			mode = 0o755
		}
		if err := os.Chmod(folder, mode); err != nil {
			return nil, err
		}
		for name, text := range files {
			file := filepath.Join(folder, name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				return nil, err
			}
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				return nil, err
			}
		}
		folders[volume.Name] = folder
	}
	return folders, nil
}

// files returns the files of a volume by their paths; nil for an empty folder.
func (p *pod) files(ctx context.Context, source *core.VolumeSource) (map[string]string, error) {
	agent, namespace := p.agent, p.object.Namespace
	switch {
	case source.EmptyDir != nil:
		return nil, nil
	case source.ConfigMap != nil:
		data, err := agent.configMap(ctx, namespace, source.ConfigMap.Name, source.ConfigMap.Optional)
		return items(data, source.ConfigMap.Items, source.ConfigMap.Optional, err)
	case source.Secret != nil:
		data, err := agent.secret(ctx, namespace, source.Secret.SecretName, source.Secret.Optional)
		return items(data, source.Secret.Items, source.Secret.Optional, err)
	case source.DownwardAPI != nil:
		return p.downward(source.DownwardAPI.Items)
	case source.Projected != nil:
		files := map[string]string{}
		for _, projection := range source.Projected.Sources {
			some, err := p.projected(ctx, &projection)
			if err != nil {
				return nil, err
			}
			for name, text := range some {
				files[name] = text
			}
		}
		return files, nil
	}
	return nil, errors.New("the node agent does not implement its type")
}

func (p *pod) projected(ctx context.Context, source *core.VolumeProjection) (map[string]string, error) {
	agent, namespace := p.agent, p.object.Namespace
	switch {
	case source.ServiceAccountToken != nil:
		token, err := p.token(ctx, source.ServiceAccountToken)
		return map[string]string{source.ServiceAccountToken.Path: token}, err
	case source.ConfigMap != nil:
		data, err := agent.configMap(ctx, namespace, source.ConfigMap.Name, source.ConfigMap.Optional)
		return items(data, source.ConfigMap.Items, source.ConfigMap.Optional, err)
	case source.Secret != nil:
		data, err := agent.secret(ctx, namespace, source.Secret.Name, source.Secret.Optional)
		return items(data, source.Secret.Items, source.Secret.Optional, err)
	case source.DownwardAPI != nil:
		return p.downward(source.DownwardAPI.Items)
	}
	return nil, errors.New("the node agent does not implement its projection")
}

func (p *pod) downward(fields []core.DownwardAPIVolumeFile) (map[string]string, error) {
	files := map[string]string{}
	for _, file := range fields {
		var value string
		var err error
		switch {
		case file.FieldRef != nil:
			value, err = p.field(file.FieldRef.FieldPath)
		case file.ResourceFieldRef != nil:
			var of *container
			if of, err = p.container(file.ResourceFieldRef.ContainerName); err == nil {
				value, err = resourceField(of.spec, file.ResourceFieldRef)
			}
		}
		if err != nil {
			return nil, err
		}
		files[file.Path] = value
	}
	return files, nil
}

// token returns a token of the service account that is bound to the pod.
func (p *pod) token(ctx context.Context, source *core.ServiceAccountTokenProjection) (string, error) {
	request := &authentication.TokenRequest{Spec: authentication.TokenRequestSpec{
		ExpirationSeconds: source.ExpirationSeconds,
		BoundObjectRef: &authentication.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: p.object.Name, UID: p.object.UID,
		},
	}}
	if source.Audience != "" {
		request.Spec.Audiences = []string{source.Audience}
	}
	accounts := p.agent.Client.CoreV1().ServiceAccounts(p.object.Namespace)
	response, err := accounts.CreateToken(ctx, p.object.Spec.ServiceAccountName, request, meta.CreateOptions{})
	if err != nil {
		return "", err
	}
	return response.Status.Token, nil
}

// items returns the selected keys under their paths; all keys without a selection.
func items(data map[string]string, selected []core.KeyToPath, optional *bool, err error) (map[string]string, error) {
	if err != nil || len(selected) == 0 {
		if data == nil {
			data = map[string]string{}
		}
		return data, err
	}
	files := map[string]string{}
	for _, item := range selected {
		text, ok := data[item.Key]
		if !ok {
			if optional != nil && *optional {
				continue
			}
			return nil, fmt.Errorf("no key %q", item.Key)
		}
		files[item.Path] = text
	}
	return files, nil
}
