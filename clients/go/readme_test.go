package icehouse

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The examples are compiled, so the README's code is, too. Its program, marked "go", is run by `make test-clients`.
func TestTheSnippetsOfTheREADMEAreInTheExamples(t *testing.T) {
	readme, examples := readText(t, "README.md"), readText(t, "example_test.go")
	examples = strings.ReplaceAll(examples, "\n\t", "\n")
	snippets := regexp.MustCompile("(?s)\n```golang\n(.*?)```\n").FindAllStringSubmatch(readme, -1)
	if len(snippets) == 0 {
		t.Fatal("there are no snippets")
	}
	for _, snippet := range snippets {
		if !strings.Contains(examples, "\n"+snippet[1]) {
			t.Errorf("example_test.go does not have:\n%s", snippet[1])
		}
	}
}

func readText(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
