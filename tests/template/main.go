// The oracle of the template tests: renders the cases with Go's text/template and sprig, and writes their outputs and
// errors as JSON.
//
// Usage: template FOLDER > expected.json
//
// template TEMPLATE DATA renders one template with the data of a JSON file thousands of times, and writes the
// nanoseconds of one rendering and its output, for the bench of the engine.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"text/template"
	"time"

	"github.com/Masterminds/sprig/v3"
)

// A case: templates of one group. The first one is rendered.
type testCase struct {
	name    string
	options []string
	texts   []string
}

// The outcome of a case; one of the two is set.
type outcome struct {
	Output *string `json:"output,omitempty"`
	Error  string  `json:"error,omitempty"`
}

func main() {
	log.SetFlags(0)
	if len(os.Args) == 3 {
		measure(os.Args[1], os.Args[2])
		return
	}
	if len(os.Args) != 2 {
		log.Fatal("usage: template FOLDER | TEMPLATE DATA")
	}
	time.Local = time.UTC
	files, err := filepath.Glob(filepath.Join(os.Args[1], "*.txt"))
	if err != nil || len(files) == 0 {
		log.Fatalf("no cases in %s", os.Args[1])
	}
	sort.Strings(files)
	outcomes := map[string]outcome{}
	for _, file := range files {
		area := strings.TrimSuffix(filepath.Base(file), ".txt")
		for _, test := range read(file) {
			key := area + "/" + test.name
			if _, ok := outcomes[key]; ok {
				log.Fatalf("%s: there are two cases %s", file, test.name)
			}
			outcomes[key] = render(test)
		}
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(outcomes); err != nil {
		log.Fatal(err)
	}
}

// measure prints the nanoseconds of one rendering in one thread, and the output.
func measure(path, values string) {
	text, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	encoded, err := os.ReadFile(values)
	if err != nil {
		log.Fatal(err)
	}
	var data map[string]any
	if err := json.Unmarshal(encoded, &data); err != nil {
		log.Fatal(err)
	}
	parsed, err := template.New("main").Funcs(sprig.TxtFuncMap()).Parse(string(text))
	if err != nil {
		log.Fatal(err)
	}
	runtime.GOMAXPROCS(1)
	var out bytes.Buffer
	render := func() {
		out.Reset()
		if err := parsed.Execute(&out, data); err != nil {
			log.Fatal(err)
		}
	}
	// The fastest of several batches is the one that other processes disturb least.
	const batches, rounds = 20, 500
	fastest := int64(math.MaxInt64)
	for range batches {
		started := time.Now()
		for range rounds {
			render()
		}
		fastest = min(fastest, time.Since(started).Nanoseconds()/rounds)
	}
	fmt.Println(fastest)
	fmt.Print(out.String())
}

// read returns the cases of a file. "=== NAME OPTION..." begins a case, and "---" a second template of its group.
func read(path string) []testCase {
	file, err := os.Open(path)
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()
	var cases []testCase
	var lines []string
	flush := func() {
		if len(cases) > 0 {
			last := &cases[len(cases)-1]
			last.texts = append(last.texts, strings.Join(lines, "\n"))
		}
		lines = nil
	}
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		line := scanner.Text()
		if header, ok := strings.CutPrefix(line, "=== "); ok {
			flush()
			words := strings.Fields(header)
			cases = append(cases, testCase{name: words[0], options: words[1:]})
		} else if line == "---" {
			flush()
		} else {
			lines = append(lines, line)
		}
	}
	flush()
	return cases
}

func render(test testCase) (result outcome) {
	group := template.New("main")
	if test.has("builtin") {
		group.Funcs(template.FuncMap{})
	} else {
		group.Funcs(sprig.TxtFuncMap())
	}
	for _, option := range test.options {
		if strings.HasPrefix(option, "missingkey=") {
			group.Option(option)
		}
	}
	for i, text := range test.texts {
		target := group
		if i > 0 {
			target = group.New(fmt.Sprintf("part%d", i))
		}
		if _, err := target.Parse(text); err != nil {
			return outcome{Error: err.Error()}
		}
	}
	var out bytes.Buffer
	if err := group.Execute(&out, data()); err != nil {
		return outcome{Error: err.Error()}
	}
	text := out.String()
	return outcome{Output: &text}
}

func (test testCase) has(option string) bool {
	for _, have := range test.options {
		if have == option {
			return true
		}
	}
	return false
}
