package main

import (
	"errors"
	"fmt"
)

// Pod is a struct with fields and methods.
type Pod struct {
	Name   string
	Labels map[string]string
	Spec   Spec
	Owner  *Pod
}

// Spec is a struct inside Pod.
type Spec struct {
	Containers []Container
	Replicas   *int32
	Host       bool
}

// Container is an element of a list.
type Container struct {
	Name string
	Port int32
}

// GetName may be called on a nil pointer, like a getter of a protobuf message.
func (p *Pod) GetName() string {
	if p == nil {
		return "nobody"
	}
	return p.Name
}

// GetOwner may return a nil pointer.
func (p *Pod) GetOwner() *Pod {
	if p == nil {
		return nil
	}
	return p.Owner
}

// Join takes arguments.
func (p *Pod) Join(separator string, parts ...string) string {
	out := p.Name
	for _, part := range parts {
		out += separator + part
	}
	return out
}

// Fail returns an error.
func (p *Pod) Fail(reason string) (string, error) {
	return "", errors.New("cannot: " + reason)
}

// Mode is an enum with names, like one of protobuf.
type Mode int32

func (m Mode) String() string {
	if m == 1 {
		return "TPROXY"
	}
	return fmt.Sprint("MODE_", int32(m))
}

// Protocol is a named string.
type Protocol string

// data returns the data of all cases. tests/template/data.rs has the same.
func data() map[string]any {
	replicas, yes, no := int32(3), true, false
	pod := &Pod{
		Name:   "web-0",
		Labels: map[string]string{"app": "web", "version": "v1"},
		Spec: Spec{
			Containers: []Container{{"app", 8080}, {"istio-proxy", 15090}},
			Replicas:   &replicas,
		},
	}
	return map[string]any{
		"name": "World", "empty": "", "text": "héllo wörld", "lines": "a\nb\n  c", "padded": "  a b ",
		"quoted": `<a href="x">'&'</a>`, "number": "12", "decimal": "1.50", "word": "abc",
		"int": 5, "neg": -7, "zero": 0, "int64": int64(64), "int32": int32(32), "int8": int8(-8),
		"uint": uint(9), "uint8": uint8(200), "uint64": uint64(18446744073709551615),
		"float": 3.25, "whole": 2.0, "big": 1e21, "million": 1234567.0, "small": 1e-7, "float32": float32(0.1),
		"yes": true, "no": false, "nil": nil,
		"list":     []any{1, "two", 3.5, nil, true},
		"strings":  []string{"b", "a", "c"},
		"ints":     []int{3, 1, 2},
		"none":     []any{},
		"nilList":  []string(nil),
		"nested":   []any{[]any{1, 2}, map[string]any{"k": "v"}, []any{}},
		"map":      map[string]any{"a": 1, "b": "x", "c": map[string]any{"d": "deep"}, "n": nil},
		"labels":   map[string]string{"app": "web", "version": "v1"},
		"counts":   map[string]int{"x": 1, "y": 2},
		"emptyMap": map[string]any{},
		"nilMap":   map[string]string(nil),
		"pod":      pod, "owned": &Pod{Name: "child", Owner: pod}, "podValue": *pod, "nilPod": (*Pod)(nil),
		"mode": Mode(1), "protocol": Protocol("TCP"),
		"truePtr": &yes, "falsePtr": &no, "replicas": &replicas, "nilInt": (*int32)(nil),
		"join": func(count int, word string) string { return fmt.Sprint(word, count) },
		"sum": func(numbers ...int) int {
			total := 0
			for _, number := range numbers {
				total += number
			}
			return total
		},
		"failing": func() (string, error) { return "", errors.New("it failed") },
	}
}
