{{/*
Computes the values of the chart. Every template begins with it, as Helm chooses the order of templates; the second call
does nothing. This file and files/profiles.yaml are the same in all charts.

In order of precedence, the last wins: the defaults in values.yaml, the profile, the settings for an older release, the
platform, the user's values. Helm merges defaults and the user's values before templates see them, so the defaults are
below a key of their own. Parity (manifests/zzz_profile.yaml), except that settings of a profile below `pilot` do not
replace the user's values at the top level.
*/}}
{{- define "istio.values" -}}
{{- if hasKey .Values "_internal_defaults_do_not_set" -}}
{{- $defaults := .Values._internal_defaults_do_not_set -}}
{{- $given := omit .Values "_internal_defaults_do_not_set" -}}
{{- $rules := .Files.Get "files/values.yaml" | fromYaml -}}
{{- include "istio.values.check" (dict "root" . "given" $given "defaults" $defaults "rules" $rules) -}}
{{- $layers := list -}}
{{- $presets := .Files.Get "files/profiles.yaml" | fromYaml -}}
{{- $global := $given.global | default dict -}}
{{- $names := dict "compatibilityVersion" $given.compatibilityVersion -}}
{{- $_ := set $names "profile" (coalesce $given.profile $global.profile) -}}
{{- $_ := set $names "platform" (coalesce $given.platform $global.platform) -}}
{{- range $kind := list "profile" "compatibilityVersion" "platform" -}}
{{- $known := get $presets $kind -}}
{{- $name := get $names $kind | default "" | toString -}}
{{- if and (eq $kind "profile") (hasPrefix "platform-" $name) -}}
{{- $known = $presets.platform -}}
{{- end -}}
{{- $name = trimPrefix "platform-" $name -}}
{{- if and $name (not (hasKey $known $name)) -}}
{{- fail (printf "unknown %s %q; known are: %s" $kind $name (keys $known | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $preset := get $known $name | default dict -}}
{{- $_ := set $names "platform" ($names.platform | default $preset.platform) -}}
{{- $layers = append $layers $preset -}}
{{- with $rules.over | default $rules.under -}}
{{- $layers = append $layers (get $preset . | default dict) -}}
{{- end -}}
{{- end -}}
{{- with $rules.under -}}
{{- $layers = append $layers (get $given . | default dict) -}}
{{- end -}}
{{- $layers = append $layers $given -}}
{{- with $rules.over -}}
{{- $layers = append $layers (get $given . | default dict) -}}
{{- end -}}
{{- $values := deepCopy $defaults -}}
{{- range $layers -}}
{{- $values = mustMergeOverwrite $values (deepCopy .) -}}
{{- end -}}
{{- $_ := set . "GivenValues" (deepCopy $given) -}}
{{- $_ := set . "Values" $values -}}
{{- end -}}
{{- end -}}

{{/* Fails if a name of the user's values is unknown. Names below `global` are those of all charts of a release, so a
chart that is part of another one cannot tell. Parameters: root, given, defaults, rules. */}}
{{- define "istio.values.check" -}}
{{- $known := mustMergeOverwrite (deepCopy .defaults) .rules.more -}}
{{- $given := .given -}}
{{- if not .root.Chart.IsRoot -}}
{{- $given = omit $given "global" -}}
{{- end -}}
{{- $found := dict "unknown" list "paths" list -}}
{{- $_ := set $found "open" (.rules.open | default list) -}}
{{- $_ := set $found "elsewhere" (.rules.elsewhere | default list) -}}
{{- with .rules.over -}}
{{- $below := get $given . | default dict -}}
{{- $given = omit $given . -}}
{{- include "istio.values.unknown" (dict "given" $below "known" $known "path" "" "in" (print . ".") "found" $found) -}}
{{- end -}}
{{- include "istio.values.unknown" (dict "given" $given "known" $known "path" "" "in" "" "found" $found) -}}
{{- if $found.unknown -}}
{{- include "istio.values.paths" (dict "known" $known "path" "" "found" $found) -}}
{{- $chart := .root.Chart.Name -}}
{{- $removed := .rules.removed | default dict -}}
{{- $errors := list -}}
{{- range $found.unknown -}}
{{- $instead := get $removed .path -}}
{{- $near := include "istio.values.nearest" (dict "path" .path "paths" $found.paths) -}}
{{- $hint := "`helm show values` lists the known ones" -}}
{{- if $instead -}}
{{- $hint = printf "Istio no longer has it; %s" $instead -}}
{{- else if $near -}}
{{- $hint = printf "did you mean %q?" $near -}}
{{- end -}}
{{- $errors = append $errors (printf "chart %s: unknown value %q; %s" $chart (print .in .path) $hint) -}}
{{- end -}}
{{- fail (printf "\n%s" (join "\n" $errors)) -}}
{{- end -}}
{{- end -}}

{{/* Adds the unknown names to found.unknown. Parameters: given, known, path, in (the map above the path), found. */}}
{{- define "istio.values.unknown" -}}
{{- $here := . -}}
{{- range $name, $value := .given -}}
{{- $path := list $here.path $name | join "." | trimPrefix "." -}}
{{- $known := get $here.known $name -}}
{{- if not (or (hasKey $here.known $name) (has $path $here.found.elsewhere)) -}}
{{- $unknown := append $here.found.unknown (dict "path" $path "in" $here.in) -}}
{{- $_ := set $here.found "unknown" $unknown -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $known) $known (not (has $path $here.found.open)) -}}
{{- $below := dict "given" $value "known" $known "path" $path "in" $here.in "found" $here.found -}}
{{- include "istio.values.unknown" $below -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Adds the paths of all known values to found.paths. Parameters: known, path, found. */}}
{{- define "istio.values.paths" -}}
{{- $here := . -}}
{{- range $name, $value := .known -}}
{{- $path := list $here.path $name | join "." | trimPrefix "." -}}
{{- $_ := set $here.found "paths" (append $here.found.paths $path) -}}
{{- if kindIs "map" $value -}}
{{- include "istio.values.paths" (dict "known" $value "path" $path "found" $here.found) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Returns the known path whose last name is most similar, if one is similar; those in the same map come first.
Parameters: path, paths. */}}
{{- define "istio.values.nearest" -}}
{{- $parts := splitList "." .path -}}
{{- $name := last $parts -}}
{{- $parent := initial $parts | join "." -}}
{{- $best := 0 -}}
{{- $nearest := "" -}}
{{- range .paths -}}
{{- $parts := splitList "." . -}}
{{- $score := include "istio.values.similarity" (dict "a" $name "b" (last $parts)) | int -}}
{{- if ge $score 55 -}}
{{- if eq $parent (initial $parts | join ".") -}}
{{- $score = add $score 20 | int -}}
{{- end -}}
{{- if gt $score $best -}}
{{- $best = $score -}}
{{- $nearest = . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $nearest -}}
{{- end -}}

{{/* Returns how similar two names are, in percent: by the pairs of letters that both have, and a little by letters.
Names with the same letters, and names that begin or end with the other, are similar in any case. Parameters: a, b. */}}
{{- define "istio.values.similarity" -}}
{{- $a := regexReplaceAll "[^a-z0-9]" (lower .a) "" -}}
{{- $b := regexReplaceAll "[^a-z0-9]" (lower .b) "" -}}
{{- if eq $a $b -}}
100
{{- else if eq (splitList "" $a | sortAlpha | join "") (splitList "" $b | sortAlpha | join "") -}}
90
{{- else if or (lt (len $a) 2) (lt (len $b) 2) -}}
0
{{- else -}}
{{- $pairs := 0 -}}
{{- range $i := until (sub (len $a) 1 | int) -}}
{{- if contains (substr $i (int (add $i 2)) $a) $b -}}
{{- $pairs = add $pairs 1 -}}
{{- end -}}
{{- end -}}
{{- $score := div (mul 200 $pairs) (sub (add (len $a) (len $b)) 2) -}}
{{- $shorter := ternary $a $b (lt (len $a) (len $b)) -}}
{{- $longer := ternary $b $a (eq $shorter $a) -}}
{{- if and (gt (len $shorter) 2) (or (hasPrefix $shorter $longer) (hasSuffix $shorter $longer)) -}}
{{- $score = max $score 60 -}}
{{- end -}}
{{- $letters := 0 -}}
{{- range splitList "" $a -}}
{{- if contains . $b -}}
{{- $letters = add $letters 1 -}}
{{- end -}}
{{- end -}}
{{- min (add $score (div (mul 5 $letters) (len $a))) 99 -}}
{{- end -}}
{{- end -}}

{{/* Requests and limits without those that are null. */}}
{{- define "istio.resources" -}}
{{- $resources := dict -}}
{{- range $kind, $amounts := . -}}
{{- if kindIs "map" $amounts -}}
{{- $given := dict -}}
{{- range $name, $amount := $amounts -}}
{{- if $amount -}}
{{- $_ := set $given $name $amount -}}
{{- end -}}
{{- end -}}
{{- $amounts = $given -}}
{{- end -}}
{{- if $amounts -}}
{{- $_ := set $resources $kind $amounts -}}
{{- end -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* Labels, annotations and the like, whose values are texts. Null removes one. */}}
{{- define "istio.texts" -}}
{{- $texts := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $texts $name (include "istio.text" $value) -}}
{{- end -}}
{{- end -}}
{{- if $texts -}}
{{ toYaml $texts }}
{{- end -}}
{{- end -}}

{{/* Returns a value as text. Helm reads whole numbers in files as floating-point ones, which print as 1e+06. */}}
{{- define "istio.text" -}}
{{- if and (kindIs "float64" .) (eq . (. | int64 | float64)) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}
