{{- define "poolwright.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ printf "%s-%s" .Release.Name $name }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "poolwright.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "poolwright.labels" -}}
{{ include "poolwright.selectorLabels" . }}
app.kubernetes.io/part-of: poolwright
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
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
{{- printf "%s/%s:%s" $repository (index . 1) (default $root.Chart.AppVersion $root.Values.image.tag) -}}
{{- end -}}

{{- /* One per namespace, whatever the release is called: pool keys derive from it, so it outlives an uninstall. */ -}}
{{- define "poolwright.rootSecretName" -}}poolwright-root{{- end -}}
