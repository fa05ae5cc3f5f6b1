{{- define "poolwright.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ printf "%s-%s" .Release.Name $name }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "poolwright.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* Ours win over commonLabels: selectors rest on them. */ -}}
{{- define "poolwright.labels" -}}
{{- $ours := include "poolwright.selectorLabels" . | fromYaml -}}
{{- $_ := set $ours "app.kubernetes.io/part-of" "poolwright" -}}
{{- $_ := set $ours "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $ours "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $ours "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- toYaml (merge $ours .Values.commonLabels) -}}
{{- end -}}

{{- define "poolwright.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "poolwright.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* usage: include "poolwright.image" (list . "engine") */ -}}
{{- define "poolwright.image" -}}
{{- $root := index . 0 -}}
{{- $repository := required "image.repository is required: no images are published yet. Build them with `make images`, push them, and set image.repository to the prefix before /control-plane and /engine" $root.Values.image.repository -}}
{{- printf "%s/%s:%s" (trimSuffix "/" $repository) (index . 1) (default $root.Chart.AppVersion $root.Values.image.tag) -}}
{{- end -}}

{{- /* One per namespace, whatever the release is called: pool keys derive from it, so it outlives an uninstall. */ -}}
{{- define "poolwright.rootSecretName" -}}poolwright-root{{- end -}}

{{- define "poolwright.crdName" -}}inferencepools.poolwright.dev{{- end -}}

{{- /* Whether a live object carries this release's ownership. usage: include "poolwright.isOurs" (list . $live) */ -}}
{{- define "poolwright.isOurs" -}}
{{- $root := index . 0 -}}
{{- $metadata := (index . 1).metadata -}}
{{- $annotations := default dict $metadata.annotations -}}
{{- $byHelm := eq "Helm" (default "" (get (default dict $metadata.labels) "app.kubernetes.io/managed-by")) -}}
{{- $name := eq $root.Release.Name (default "" (get $annotations "meta.helm.sh/release-name")) -}}
{{- $namespace := eq $root.Release.Namespace (default "" (get $annotations "meta.helm.sh/release-namespace")) -}}
{{- if and $byHelm $name $namespace -}}yes{{- end -}}
{{- end -}}
